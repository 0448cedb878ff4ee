import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

SEED = 2024
BATCH = 8192


def epoch_indices(n, epoch, rank, world):
    """The same permutation everywhere, another slice on each rank."""
    g = torch.Generator().manual_seed(SEED + epoch)
    perm = torch.randperm(n, generator=g)
    usable = n // (world * BATCH) * (world * BATCH)
    return perm[:usable][rank::world]


class DLRMSmall(nn.Module):
    def __init__(self, sizes, dense=13, dim=64):
        super().__init__()
        self.emb = nn.ModuleList(nn.Embedding(s, dim) for s in sizes)
        self.bottom = nn.Sequential(nn.Linear(dense, 256), nn.ReLU(), nn.Linear(256, dim), nn.ReLU())
        k = len(sizes) + 1
        self.top = nn.Sequential(nn.Linear(dim + k * (k - 1) // 2, 512), nn.ReLU(),
                                 nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 1))
        i, j = torch.tril_indices(k, k, -1)
        self.register_buffer("i", i, persistent=False)
        self.register_buffer("j", j, persistent=False)

    def forward(self, dense, cat):
        d = self.bottom(dense)
        z = torch.stack([d] + [e(cat[:, k]) for k, e in enumerate(self.emb)], 1)
        inter = (z @ z.transpose(1, 2))[:, self.i, self.j]
        return self.top(torch.cat([d, inter], 1)).squeeze(1)


def main():
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)

    blob = torch.load("/data/criteo/kaggle.pt", map_location="cpu", mmap=True)
    dense, cat, y = blob["dense"], blob["cat"], blob["label"]
    model = DDP(DLRMSmall(blob["sizes"]).cuda(), device_ids=[local])
    opt = torch.optim.Adagrad(model.parameters(), 0.01)
    bce = nn.BCEWithLogitsLoss()

    for epoch in range(3):
        for idx in epoch_indices(len(y), epoch, rank, world).split(BATCH):
            out = model(dense[idx].float().cuda(), cat[idx].long().cuda())
            loss = bce(out, y[idx].float().cuda())
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
        if rank == 0:
            print(epoch, loss.item(), flush=True)
            torch.save(model.module.state_dict(), "dlrm.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
