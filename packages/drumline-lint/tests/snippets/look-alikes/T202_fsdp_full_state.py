import os
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullStateDictConfig, FullOptimStateDictConfig, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoModelForMaskedLM
from datasets import load_from_disk


class Checkpointer:
    def __init__(self, folder):
        self.folder = folder
        self.rank = dist.get_rank()

    def __call__(self, model, optim, step):
        with FSDP.state_dict_type(
            model,
            StateDictType.FULL_STATE_DICT,
            FullStateDictConfig(offload_to_cpu=True, rank0_only=True),
            FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=True),
        ):
            weights = model.state_dict()
            optim_state = FSDP.optim_state_dict(model, optim)
        if self.rank != 0:
            return
        os.makedirs(self.folder, exist_ok=True)
        tmp = os.path.join(self.folder, f"step{step}.pt.tmp")
        torch.save({"model": weights, "optim": optim_state, "step": step}, tmp)
        os.replace(tmp, tmp[:-4])


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")

    model = FSDP(
        AutoModelForMaskedLM.from_pretrained("xlm-roberta-large"),
        auto_wrap_policy=partial(size_based_auto_wrap_policy, min_num_params=20_000_000),
        device_id=local_rank,
        use_orig_params=True,
    )
    optim = torch.optim.AdamW(model.parameters(), lr=5e-5)
    ds = load_from_disk("/data/xlmr_mlm").with_format("torch")
    sampler = DistributedSampler(ds, drop_last=True)
    loader = DataLoader(ds, 16, sampler=sampler, num_workers=4, drop_last=True)
    save = Checkpointer("/ckpt/xlmr")

    step = 0
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for batch in loader:
            loss = model(**{k: v.cuda(non_blocking=True) for k, v in batch.items()}).loss
            loss.backward()
            model.clip_grad_norm_(1.0)
            optim.step()
            optim.zero_grad()
            step += 1
            if step % 1000 == 0:
                save(model, optim, step)
    save(model, optim, step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
