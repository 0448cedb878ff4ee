import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def build_dataset():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(100_000, 64, generator=generator)
    return TensorDataset(x, x.sum(dim=1, keepdim=True))


def run(rank, world_size, epochs):
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=world_size)
    dataset = build_dataset()
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=512, sampler=sampler)
    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1)).cuda()
    net = DistributedDataParallel(net, device_ids=[rank])
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(net(x.cuda()), y.cuda()).backward()
            optimizer.step()
    if rank == 0:
        torch.save(net.module.state_dict(), "tabular.pt")
    dist.destroy_process_group()


os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "29571")
gpus = torch.cuda.device_count()
print(f"starting {gpus} workers")
mp.spawn(run, args=(gpus, 20), nprocs=gpus, join=True)
