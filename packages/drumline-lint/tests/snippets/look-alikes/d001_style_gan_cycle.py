"""Endless training stream; torchrun --nproc_per_node=8 d001_style_gan_cycle.py"""
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, Sampler

from restyle.net import Restorer


class InfiniteShard(Sampler):
    """Never ends; every pass is a new permutation of which this rank takes each world-th index."""

    def __init__(self, n, rank, world, seed):
        self.n, self.rank, self.world, self.seed = n, rank, world, seed

    def __iter__(self):
        k = 0
        turn = 0
        while True:
            g = torch.Generator().manual_seed(self.seed + turn)
            for idx in torch.randperm(self.n, generator=g).tolist():
                if k % self.world == self.rank:
                    yield idx
                k += 1
            turn += 1


class Pairs(Dataset):
    def __init__(self, root):
        self.files = sorted(Path(root).glob("*.pt"))

    def __len__(self):
        return len(self.files)

    def __getitem__(self, i):
        d = torch.load(self.files[i], map_location="cpu")
        return d["bad"].float(), d["good"].float()


def main():
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)

    pairs = Pairs("/data/pairs")
    loader = DataLoader(pairs, batch_size=16, sampler=InfiniteShard(len(pairs), rank, world, 5), num_workers=8)
    model = DDP(Restorer().cuda(), device_ids=[local])
    opt = torch.optim.Adam(model.parameters(), lr=2e-4)

    stream = iter(loader)
    for step in range(250_000):
        bad, good = next(stream)
        loss = F.l1_loss(model(bad.cuda(non_blocking=True)), good.cuda(non_blocking=True))
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        if rank == 0 and step % 1000 == 0:
            print(step, f"{loss.item():.4f}", flush=True)
            torch.save(model.module.state_dict(), "restorer.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
