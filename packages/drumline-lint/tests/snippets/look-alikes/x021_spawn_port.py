"""One process for each visible GPU: python spawn_port.py"""
import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def worker(rank, world_size, port, cfg):
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = str(port)
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=world_size)
    blob = torch.load(cfg["features"], map_location="cpu")
    data = TensorDataset(blob["hops"], blob["label"])
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, batch_size=cfg["batch"], sampler=sampler)
    net = nn.Sequential(nn.Flatten(), nn.Linear(400, 512), nn.PReLU(), nn.Linear(512, 47)).cuda()
    net = DDP(net, device_ids=[rank])
    opt = torch.optim.Adam(net.parameters(), lr=cfg["lr"])
    for epoch in range(cfg["epochs"]):
        sampler.set_epoch(epoch)
        for hops, label in loader:
            opt.zero_grad()
            nn.functional.cross_entropy(net(hops.cuda()), label.cuda()).backward()
            opt.step()
    if rank == 0:
        torch.save(net.module.state_dict(), "sign.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    config = {"features": "/data/products_hops.pt", "batch": 4096, "lr": 1e-3, "epochs": 200}
    n = torch.cuda.device_count()
    mp.spawn(worker, args=(n, free_port(), config), nprocs=n, join=True)
