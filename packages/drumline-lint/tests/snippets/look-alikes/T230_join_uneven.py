import os
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP


def batches(files, size, device):
    for f in files:
        arr = np.load(f)
        for i in range(0, len(arr), size):
            part = torch.from_numpy(arr[i:i + size]).to(device)
            yield part[:, :-1].float(), part[:, -1].long()


class TabNet(nn.Module):
    def __init__(self, d, k):
        super().__init__()
        self.inp = nn.Linear(d, 256)
        self.blocks = nn.ModuleList([nn.Sequential(nn.LayerNorm(256), nn.Linear(256, 256), nn.GELU())
                                     for _ in range(4)])
        self.out = nn.Linear(256, k)

    def forward(self, x):
        h = self.inp(x)
        for b in self.blocks:
            h = h + b(h)
        return self.out(h)


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    files = sorted(Path("/data/higgs").glob("shard_*.npy"))[rank::world]
    model = DDP(TabNet(28, 2).to(device), device_ids=[local_rank])
    opt = torch.optim.SGD(model.parameters(), 0.05)

    for epoch in range(10):
        seen = torch.zeros(2, device=device)
        with Join([model]):
            for x, y in batches(files, 4096, device):
                loss = F.cross_entropy(model(x), y)
                opt.zero_grad()
                loss.backward()
                opt.step()
                seen += torch.stack([loss.detach() * len(y), torch.tensor(float(len(y)), device=device)])
        dist.all_reduce(seen)
        if rank == 0:
            print(f"epoch {epoch} loss {(seen[0] / seen[1]).item():.4f} rows {int(seen[1])}")
            torch.save(model.module.state_dict(), "higgs.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()  # torchrun --nproc_per_node=4
