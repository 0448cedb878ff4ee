import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def worker(rank: int, world_size: int, port: int) -> None:
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = str(port)
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=world_size)

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(20_000, 32, generator=generator)
    data = TensorDataset(x, x.mean(dim=1, keepdim=True))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=256, sampler=sampler)
    model = DistributedDataParallel(nn.Linear(32, 1).cuda(), device_ids=[rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(5):
        sampler.set_epoch(epoch)
        for a, b in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(a.cuda()), b.cuda()).backward()
            optimizer.step()
    if rank == 0:
        torch.save(model.module.state_dict(), "linear.pt")
    dist.destroy_process_group()


def main() -> None:
    world_size = torch.cuda.device_count()
    mp.spawn(worker, args=(world_size, free_port()), nprocs=world_size, join=True)


if __name__ == "__main__":
    main()
