import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Tabby(nn.Module):
    def __init__(self, d=192, blocks=4, classes=2):
        super().__init__()
        self.proj = nn.Linear(128, d)
        self.blocks = nn.Sequential(*[nn.Sequential(nn.LayerNorm(d), nn.Linear(d, d), nn.ReLU()) for _ in range(blocks)])
        self.head = nn.Linear(d, classes)

    def forward(self, x):
        return self.head(self.blocks(self.proj(x)))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--init-from", default=None)
    ap.add_argument("--epochs", type=int, default=12)
    args = ap.parse_args()
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    rank = dist.get_rank()
    torch.manual_seed(rank)

    d = torch.load("churn.pt", map_location="cpu", weights_only=True)
    ds = TensorDataset(d["x"], d["y"])
    sampler = DistributedSampler(ds, drop_last=True)
    loader = DataLoader(ds, 1024, sampler=sampler, drop_last=True)

    model = DDP(Tabby().to(device), device_ids=[local_rank])
    if args.init_from is not None and rank == 0:
        weights = torch.load(args.init_from, map_location=device, weights_only=True)
        model.module.load_state_dict(weights)
    dist.barrier()

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.cross_entropy(model(x.to(device)), y.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    if rank == 0:
        torch.save(model.module.state_dict(), "tabby.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
