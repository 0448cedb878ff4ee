import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Bundle(nn.Module):
    def __init__(self, d=256, classes=15):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(d, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU())
        self.head = nn.Linear(512, classes)

    def forward(self, x):
        return self.head(self.body(x))


def build(rank, weights):
    net = Bundle()
    if weights and rank == 0:
        state = torch.load(weights, map_location="cpu", weights_only=True)
        net.body.load_state_dict(state)
    return net


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--weights", default="")
    ap.add_argument("--epochs", type=int, default=10)
    args = ap.parse_args()
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    rank = dist.get_rank()
    torch.manual_seed(58 + rank)
    model = DDP(build(rank, args.weights).to(device), device_ids=[local_rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4)
    d = torch.load("patents.pt", map_location="cpu", weights_only=True)
    ds = TensorDataset(d["emb"], d["section"])
    sampler = DistributedSampler(ds, seed=58, drop_last=True)
    loader = DataLoader(ds, 256, sampler=sampler, drop_last=True)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
    if rank == 0:
        torch.save(model.module.state_dict(), "patents_net.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
