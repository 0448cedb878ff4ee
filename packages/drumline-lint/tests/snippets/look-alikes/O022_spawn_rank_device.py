import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from toy.data import Spirals
from toy.model import Net


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def worker(rank, world, port):
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = str(port)
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=world)
    ds = Spirals(100_000)
    sampler = DistributedSampler(ds)
    loader = DataLoader(ds, 512, sampler=sampler, drop_last=True)
    model = DDP(Net().to(rank), device_ids=[rank])
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(10):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = torch.nn.functional.cross_entropy(model(x.to(rank)), y.to(rank))
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0:
            print(epoch, loss.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    n = torch.cuda.device_count()
    mp.spawn(worker, args=(n, free_port()), nprocs=n)
