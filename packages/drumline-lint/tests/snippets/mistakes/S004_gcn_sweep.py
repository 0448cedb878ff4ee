"""Train a GCN-style node classifier on several seeds; one CSV collects results.
Run with: torchrun --nproc_per_node=4 gcn_sweep.py
"""
import csv
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset, DistributedSampler

RESULTS = "results/gcn_sweep.csv"
SEEDS = [0, 1, 2, 3, 4]


class PropMLP(nn.Module):
    def __init__(self, in_dim, hid, out_dim, p=0.5):
        super().__init__()
        self.l1 = nn.Linear(in_dim, hid)
        self.l2 = nn.Linear(hid, out_dim)
        self.p = p

    def forward(self, x):
        x = F.dropout(F.relu(self.l1(x)), self.p, self.training)
        return self.l2(x)


def load(split):
    d = torch.load(f"data/arxiv_sgc_{split}.pt", map_location="cpu")
    return TensorDataset(d["x"], d["y"])


def evaluate(model, loader, dev):
    model.eval()
    hit = torch.zeros(2, dtype=torch.float64, device=dev)
    with torch.no_grad():
        for x, y in loader:
            x, y = x.to(dev), y.to(dev)
            hit[0] += (model(x).argmax(-1) == y).sum()
            hit[1] += y.numel()
    dist.all_reduce(hit)
    return (hit[0] / hit[1]).item()


def train_one(seed, dev, train, test, epochs=40):
    torch.manual_seed(seed)
    model = DDP(PropMLP(128, 256, 40).to(dev), device_ids=[dev.index])
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    sampler = DistributedSampler(train, seed=seed)
    loader = DataLoader(train, 4096, sampler=sampler)
    test_loader = DataLoader(test, 8192, sampler=DistributedSampler(test, shuffle=False))
    for ep in range(epochs):
        sampler.set_epoch(ep)
        model.train()
        for x, y in loader:
            loss = F.cross_entropy(model(x.to(dev)), y.to(dev))
            opt.zero_grad()
            loss.backward()
            opt.step()
    return evaluate(model, test_loader, dev)


def main():
    dist.init_process_group("nccl")
    dev = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(dev)
    os.makedirs("results", exist_ok=True)
    train, test = load("train"), load("test")

    for seed in SEEDS:
        t0 = time.time()
        acc = train_one(seed, dev, train, test)
        with open(RESULTS, "a", newline="") as fh:
            csv.writer(fh).writerow([seed, f"{acc:.4f}", f"{time.time() - t0:.1f}"])
        if dist.get_rank() == 0:
            print(f"seed {seed}: acc {acc:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
