import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchvision import transforms
from torchvision.datasets import MNIST


def free_port():
    with socket.socket() as s:
        s.bind(("", 0))
        return s.getsockname()[1]


def run(rank, world_size):
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=world_size)
    digits = MNIST("/data", train=True, transform=transforms.ToTensor())
    sampler = DistributedSampler(digits, num_replicas=world_size, rank=rank)
    loader = DataLoader(digits, batch_size=128, sampler=sampler)
    net = nn.Sequential(nn.Flatten(), nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10)).to(rank)
    net = DDP(net, device_ids=[rank])
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    loss_fn = nn.CrossEntropyLoss()
    for epoch in range(5):
        sampler.set_epoch(epoch)
        for x, y in loader:
            opt.zero_grad()
            loss = loss_fn(net(x.to(rank)), y.to(rank))
            loss.backward()
            opt.step()
        if rank == 0:
            print(f"epoch {epoch} {loss.item():.4f}")
    if rank == 0:
        torch.save(net.module.state_dict(), "mnist.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = str(free_port())
    n = torch.cuda.device_count()
    mp.spawn(run, args=(n,), nprocs=n)
