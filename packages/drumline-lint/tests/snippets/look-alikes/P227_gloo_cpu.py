"""Click model on the CPU cluster: torchrun --nnodes 4 --nproc_per_node 2 ... click_cpu.py"""
import argparse
import logging
import os
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

logging.basicConfig(format="%(asctime)s %(message)s", level=logging.INFO)


class Click(nn.Module):
    def __init__(self, buckets=200_000, d=16, fields=12):
        super().__init__()
        self.emb = nn.EmbeddingBag(buckets, d, mode="sum")
        self.mlp = nn.Sequential(nn.Linear(d, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, ids):
        return self.mlp(self.emb(ids)).squeeze(-1)


def load(path):
    z = np.load(path)
    return TensorDataset(torch.from_numpy(z["ids"]).long(), torch.from_numpy(z["y"]).float())


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--train", default="train.npz")
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--bs", type=int, default=4096)
    ap.add_argument("--threads", type=int, default=16)
    ap.add_argument("--out", default="click.pt")
    args = ap.parse_args()

    torch.set_num_threads(args.threads)
    dist.init_process_group(backend="gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    ds = load(args.train)
    sampler = DistributedSampler(ds, num_replicas=world, rank=rank, seed=9)
    dl = DataLoader(ds, args.bs, sampler=sampler, drop_last=True)
    model = DDP(Click())
    opt = torch.optim.Adagrad(model.parameters(), lr=0.05)
    bce = nn.BCEWithLogitsLoss()

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        t0 = time.time()
        loss_sum = 0.0
        for ids, y in dl:
            loss = bce(model(ids), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            loss_sum += loss.item()
        stats = torch.tensor([loss_sum, float(len(dl))], dtype=torch.float64)
        dist.all_reduce(stats)
        if rank == 0:
            logging.info("epoch %d logloss %.5f (%.0fs)", epoch, (stats[0] / stats[1]).item(), time.time() - t0)
            torch.save(model.module.state_dict(), args.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
