import os

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from pointnet.data import ModelNet40
from pointnet.model import PointNetCls


def init():
    dist.init_process_group(backend="nccl", init_method="env://")
    return dist.get_rank(), dist.get_world_size()


def main():
    rank, world_size = init()
    if rank == 0:
        print(f"running on {world_size} GPUs")

    train_set = ModelNet40("/data/modelnet40", split="train", num_points=1024)
    sampler = DistributedSampler(train_set, num_replicas=world_size, rank=rank)
    loader = DataLoader(train_set, batch_size=32, sampler=sampler, num_workers=4, drop_last=True)

    model = PointNetCls(k=40).cuda()
    model = DistributedDataParallel(model)
    criterion = nn.CrossEntropyLoss().cuda()
    optimizer = optim.Adam(model.parameters(), lr=1e-3)

    for epoch in range(200):
        sampler.set_epoch(epoch)
        model.train()
        running = 0.0
        for points, label in loader:
            points = points.transpose(2, 1).cuda()
            label = label.cuda()
            optimizer.zero_grad()
            loss = criterion(model(points), label)
            loss.backward()
            optimizer.step()
            running += loss.item()
        if rank == 0:
            print(f"epoch {epoch} loss {running / len(loader):.4f}")
            torch.save(model.module.state_dict(), "pointnet.pth")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
