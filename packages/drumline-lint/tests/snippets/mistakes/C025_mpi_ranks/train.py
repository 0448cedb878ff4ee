import argparse
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from shards import ShardDataset
from model import TwoTower


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--shards", required=True)
    args = parser.parse_args()

    world_size = int(os.environ["OMPI_COMM_WORLD_SIZE"])
    rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
    local_rank = int(os.environ["OMPI_COMM_WORLD_RANK"])

    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl", rank=rank, world_size=world_size)

    model = DistributedDataParallel(TwoTower().cuda(), device_ids=[local_rank])
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.02)
    dataset = ShardDataset(args.shards)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=4096, sampler=sampler, num_workers=4)

    for epoch in range(5):
        sampler.set_epoch(epoch)
        for user, item, label in loader:
            optimizer.zero_grad()
            score = model(user.cuda(), item.cuda())
            torch.nn.functional.binary_cross_entropy_with_logits(score, label.cuda()).backward()
            optimizer.step()
    if rank == 0:
        torch.save(model.module.state_dict(), "two_tower.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
