import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils.data import DataLoader, DistributedSampler

from checkpointing import Checkpointer
from esm_small import Block, ProteinLM, Sequences


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    ds = Sequences("/data/uniref50/train.pt")
    sampler = DistributedSampler(ds, drop_last=True)
    loader = DataLoader(ds, 32, sampler=sampler, num_workers=4, drop_last=True)
    model = FSDP(ProteinLM(), auto_wrap_policy=ModuleWrapPolicy({Block}),
                 device_id=local_rank, sync_module_states=True)
    opt = torch.optim.AdamW(model.parameters(), lr=4e-4)
    ck = Checkpointer("ckpt_protein")
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for noisy, target in loader:
            logits = model(noisy.cuda())
            loss = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), target.cuda().flatten(), ignore_index=-100)
            opt.zero_grad()
            loss.backward()
            opt.step()
        ck.write(model, epoch)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
