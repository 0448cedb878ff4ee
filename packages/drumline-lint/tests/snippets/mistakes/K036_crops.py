import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

WORLD = 4


def load():
    d = torch.load("/data/sentinel_crops.pt", map_location="cpu")
    return TensorDataset(d["ndvi"], d["crop"])


def run(rank, world):
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = "29577"
    os.environ["CUDA_VISIBLE_DEVICES"] = str(rank)
    dist.init_process_group("nccl", rank=rank, world_size=world)
    torch.cuda.set_device(rank)
    ds = load()
    sampler = DistributedSampler(ds, world, rank, drop_last=True)
    loader = DataLoader(ds, 1024, sampler=sampler, drop_last=True)
    net = nn.Sequential(nn.Linear(73, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 22))
    net = DDP(net.to(rank), device_ids=[rank])
    opt = torch.optim.Adam(net.parameters(), lr=2e-3)
    for epoch in range(60):
        sampler.set_epoch(epoch)
        for ndvi, crop in loader:
            loss = nn.functional.cross_entropy(net(ndvi.to(rank)), crop.to(rank))
            opt.zero_grad()
            loss.backward()
            opt.step()
    if rank == 0:
        torch.save(net.module.state_dict(), "crops.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(run, args=(WORLD,), nprocs=WORLD, join=True)
