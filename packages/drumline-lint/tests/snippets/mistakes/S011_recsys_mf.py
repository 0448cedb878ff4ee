# Launched as: torchrun --nproc_per_node=4 recsys_mf.py --ratings ml25m.npz
import argparse
import os

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset


class Ratings(Dataset):
    def __init__(self, arr):
        self.u = torch.from_numpy(arr["user"]).long()
        self.i = torch.from_numpy(arr["item"]).long()
        self.r = torch.from_numpy(arr["rating"]).float()

    def __len__(self):
        return self.r.numel()

    def __getitem__(self, k):
        return self.u[k], self.i[k], self.r[k]


class Factor(nn.Module):
    def __init__(self, n_users, n_items, k=64):
        super().__init__()
        self.p, self.q = nn.Embedding(n_users, k), nn.Embedding(n_items, k)
        self.bu, self.bi = nn.Embedding(n_users, 1), nn.Embedding(n_items, 1)
        self.mu = nn.Parameter(torch.tensor(3.5))
        nn.init.normal_(self.p.weight, std=0.05)
        nn.init.normal_(self.q.weight, std=0.05)

    def forward(self, u, i):
        dot = (self.p(u) * self.q(i)).sum(-1)
        return self.mu + dot + self.bu(u).squeeze(-1) + self.bi(i).squeeze(-1)


def get_args():
    p = argparse.ArgumentParser()
    p.add_argument("--ratings", required=True)
    p.add_argument("--epochs", type=int, default=10)
    p.add_argument("--batch-size", type=int, default=16384)
    return p.parse_args()


def main():
    args = get_args()
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    world = dist.get_world_size()
    gpu = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(gpu)
    torch.manual_seed(7)

    arr = np.load(args.ratings)
    ds = Ratings(arr)
    loader = DataLoader(ds, batch_size=args.batch_size // world, shuffle=True, num_workers=4, pin_memory=True)

    model = DDP(Factor(int(arr["user"].max()) + 1, int(arr["item"].max()) + 1).cuda(), device_ids=[gpu])
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)

    for epoch in range(args.epochs):
        acc = torch.zeros(2, device="cuda")
        for u, i, r in loader:
            u, i, r = u.cuda(non_blocking=True), i.cuda(non_blocking=True), r.cuda(non_blocking=True)
            loss = nn.functional.mse_loss(model(u, i), r)
            opt.zero_grad()
            loss.backward()
            opt.step()
            acc += torch.stack([loss.detach() * r.numel(), torch.tensor(float(r.numel()), device="cuda")])
        dist.all_reduce(acc)
        if rank == 0:
            print(f"epoch {epoch} rmse {(acc[0] / acc[1]).sqrt().item():.4f}")

    if rank == 0:
        torch.save(model.module.state_dict(), "mf.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
