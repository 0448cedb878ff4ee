"""Adversarial training: ranks 0-5 train the generator side, 6-7 score samples in a group of their own."""
import os
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

from synth.data import endless_batches
from synth.nets import Generator, Scorer

ROUNDS = 4000
TRAIN_RANKS = list(range(6))
SCORE_RANKS = [6, 7]


def train_side(rank, device, group):
    model = DDP(Generator().to(device), device_ids=[device.index], process_group=group)
    opt = torch.optim.Adam(model.parameters(), lr=1e-4)
    stream = endless_batches("/data/synth", rank, len(TRAIN_RANKS))
    for r in range(ROUNDS):
        x = next(stream).to(device)
        loss = nn.functional.mse_loss(model(x), x)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if r % 50 == 0:
            mean = loss.detach().clone()
            dist.all_reduce(mean, group=group)
            if rank == 0:
                print(f"round {r} loss {mean.item() / len(TRAIN_RANKS):.4f}", flush=True)
    if rank == 0:
        torch.save(model.module.state_dict(), "generator.pt")


def score_side(rank, device, group):
    model = DDP(Scorer().to(device), device_ids=[device.index], process_group=group)
    opt = torch.optim.Adam(model.parameters(), lr=1e-4)
    stream = endless_batches("/data/scored", rank - SCORE_RANKS[0], len(SCORE_RANKS))
    for r in range(ROUNDS // 2):
        x = next(stream).to(device)
        loss = model(x).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        if r % 500 == 499:
            dist.barrier(group=group)
            if rank == SCORE_RANKS[0]:
                torch.save(model.module.state_dict(), "scorer.pt")


def main():
    dist.init_process_group("nccl", timeout=timedelta(hours=12))
    rank = dist.get_rank()
    assert dist.get_world_size() == 8
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    train_group = dist.new_group(TRAIN_RANKS)
    score_group = dist.new_group(SCORE_RANKS)

    if rank in TRAIN_RANKS:
        train_side(rank, device, train_group)
    else:
        score_side(rank, device, score_group)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
