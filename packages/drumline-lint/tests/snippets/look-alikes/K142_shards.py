import os

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset


def my_rows(path, rank, world):
    x = np.load(f"{path}/x.npy", mmap_mode="r")
    y = np.load(f"{path}/y.npy", mmap_mode="r")
    n = len(x) // world
    lo = rank * n
    return TensorDataset(torch.from_numpy(x[lo:lo + n].copy()).float(),
                         torch.from_numpy(y[lo:lo + n].copy()).long())


class TabMLP(nn.Module):
    def __init__(self, inputs, classes, width=768):
        super().__init__()
        self.inp = nn.Linear(inputs, width)
        self.mid = nn.ModuleList(nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU())
                                 for _ in range(4))
        self.out = nn.Linear(width, classes)

    def forward(self, x):
        h = self.inp(x)
        for m in self.mid:
            h = h + m(h)
        return self.out(h)


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(9 + rank)
    shard = my_rows("/data/higgs_shuffled", rank, world)
    loader = DataLoader(shard, batch_size=8192, shuffle=True, drop_last=True, pin_memory=True)
    net = DDP(TabMLP(28, 2).cuda(), device_ids=[local_rank])
    opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, 4e-3, epochs=25, steps_per_epoch=len(loader))
    for epoch in range(25):
        for x, y in loader:
            loss = nn.functional.cross_entropy(net(x.cuda(non_blocking=True)), y.cuda(non_blocking=True))
            opt.zero_grad()
            loss.backward()
            opt.step()
            sched.step()
        if rank == 0:
            torch.save(net.module.state_dict(), "higgs.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
