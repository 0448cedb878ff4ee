"""torchrun --nproc_per_node=8 train.py"""
import os

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from model import Block, MusicLM


class Codes(Dataset):
    def __init__(self, path, ctx=2048):
        self.a, self.ctx = np.load(path, mmap_mode="r"), ctx

    def __len__(self):
        return len(self.a) // (self.ctx + 1)

    def __getitem__(self, i):
        n = self.ctx + 1
        return torch.from_numpy(self.a[i * n:(i + 1) * n].astype(np.int64))


def main():
    dist.init_process_group("nccl")
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)

    ds = Codes("/data/codes.npy")
    sampler = DistributedSampler(ds, drop_last=True)
    loader = DataLoader(ds, 4, sampler=sampler, num_workers=2, drop_last=True)
    model = FSDP(
        MusicLM(),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        sharding_strategy=ShardingStrategy.FULL_SHARD,
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        device_id=local,
    )
    opt = torch.optim.AdamW(model.parameters(), lr=2e-4)

    for epoch in range(4):
        sampler.set_epoch(epoch)
        for step, seq in enumerate(loader):
            seq = seq.cuda()
            logits = model(seq[:, :-1])
            loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), seq[:, 1:].flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            opt.zero_grad(set_to_none=True)
            if step % 50 == 0 and dist.get_rank() == 0:
                print(epoch, step, loss.item(), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
