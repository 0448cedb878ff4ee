import argparse
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from weather.data import ERA5
from weather.model import SwinForecaster


class DistEnv:
    def __init__(self):
        self.rank = int(os.environ["RANK"])
        self.world_size = int(os.environ["WORLD_SIZE"])
        self.nodes = self.world_size // int(os.environ["LOCAL_WORLD_SIZE"])
        self.device = torch.device(f"cuda:{self.rank}")

    def start(self):
        torch.cuda.set_device(self.device)
        dist.init_process_group("nccl", rank=self.rank, world_size=self.world_size)
        if self.rank == 0:
            print(f"{self.nodes} nodes, {self.world_size} processes")


def main():
    parser = argparse.ArgumentParser(
        usage="torchrun --nnodes=4 --nproc_per_node=8 --rdzv_backend=c10d --rdzv_endpoint=$HOST:29400 train.py")
    parser.add_argument("--years", nargs=2, type=int, default=(1979, 2017))
    parser.add_argument("--steps", type=int, default=100_000)
    args = parser.parse_args()

    env = DistEnv()
    env.start()
    dataset = ERA5(*args.years)
    sampler = DistributedSampler(dataset, drop_last=True)
    loader = DataLoader(dataset, 1, sampler=sampler, num_workers=8, pin_memory=True)
    model = DDP(SwinForecaster().to(env.device), device_ids=[env.device])
    optimizer = torch.optim.AdamW(model.parameters(), lr=2.5e-4)

    step = epoch = 0
    while step < args.steps:
        sampler.set_epoch(epoch)
        for now, then in loader:
            loss = (model(now.to(env.device)) - then.to(env.device)).abs().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % 1000 == 0 and env.rank == 0:
                torch.save(model.module.state_dict(), f"/lustre/era5/{step}.pt")
        epoch += 1
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
