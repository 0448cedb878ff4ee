import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Molecules(Dataset):
    """Dense padded graphs: features, adjacency, mask, target."""

    def __init__(self, path):
        blob = torch.load(path, map_location="cpu")
        self.items = list(zip(blob["x"], blob["adj"], blob["mask"], blob["gap"]))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


class GNN(nn.Module):
    def __init__(self, f=64, h=512, layers=8):
        super().__init__()
        self.inp = nn.Linear(f, h)
        self.layers = nn.ModuleList(nn.Linear(2 * h, h) for _ in range(layers))
        self.out = nn.Linear(h, 1)

    def forward(self, x, adj, mask):
        h = self.inp(x)
        for lin in self.layers:
            h = h + torch.relu(lin(torch.cat([h, adj @ h], -1)))
        h = (h * mask[..., None]).sum(1) / mask.sum(1, keepdim=True).clamp(min=1)
        return self.out(h).squeeze(-1)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("data")
    ap.add_argument("--ckpt", default="gnn_last.pt")
    ap.add_argument("--epochs", type=int, default=300)
    args = ap.parse_args()

    dist.init_process_group("nccl")
    rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)

    model = DDP(GNN().cuda(), device_ids=[local_rank])
    opt = torch.optim.AdamW(model.parameters(), 5e-4)
    start = 0
    if os.path.exists(args.ckpt):
        ckpt = torch.load(args.ckpt)
        model.module.load_state_dict(ckpt["model"])
        opt.load_state_dict(ckpt["opt"])
        start = ckpt["epoch"] + 1
    dist.barrier()

    ds = Molecules(args.data)
    sampler = DistributedSampler(ds, drop_last=True)
    loader = DataLoader(ds, 64, sampler=sampler, drop_last=True)
    for epoch in range(start, args.epochs):
        sampler.set_epoch(epoch)
        for batch in loader:
            x, adj, mask, y = (t.cuda(non_blocking=True) for t in batch)
            loss = nn.functional.l1_loss(model(x, adj, mask), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0:
            tmp = args.ckpt + ".tmp"
            torch.save({"model": model.module.state_dict(), "opt": opt.state_dict(),
                        "epoch": epoch}, tmp)
            os.replace(tmp, args.ckpt)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
