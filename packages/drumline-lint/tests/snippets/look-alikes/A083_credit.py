import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def run(rank, world_size, port, epochs):
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = str(port)
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", rank=rank, world_size=world_size, device_id=device)
    torch.manual_seed(45 + rank)
    d = torch.load("credit.pt", map_location="cpu", weights_only=True)
    ds = TensorDataset(d["x"], d["default"].float())
    sampler = DistributedSampler(ds, num_replicas=world_size, rank=rank, seed=45, drop_last=True)
    loader = DataLoader(ds, 512, sampler=sampler, drop_last=True)
    model = DDP(nn.Sequential(nn.Linear(30, 128), nn.ReLU(), nn.Linear(128, 1)).to(device), device_ids=[rank])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            logit = model(x.to(device)).squeeze(-1)
            loss = nn.functional.binary_cross_entropy_with_logits(logit, y.to(device))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
    if rank == 0:
        torch.save(model.module.state_dict(), "credit_net.pt")
    dist.destroy_process_group()


def main():
    world_size = torch.cuda.device_count()
    mp.spawn(run, args=(world_size, free_port(), 15), nprocs=world_size, join=True)


if __name__ == "__main__":
    main()
