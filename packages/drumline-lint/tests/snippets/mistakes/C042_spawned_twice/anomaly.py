import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from anomaly_data import SensorWindows
from anomaly_model import AutoEncoder


def worker(rank, world_size):
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = "29581"
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=world_size)

    windows = SensorWindows("/data/sensors", length=512)
    sampler = DistributedSampler(windows)
    loader = DataLoader(windows, batch_size=256, sampler=sampler, num_workers=2)
    model = DistributedDataParallel(AutoEncoder().cuda(), device_ids=[rank])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(25):
        sampler.set_epoch(epoch)
        for window in loader:
            window = window.cuda()
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(window), window).backward()
            optimizer.step()
    if rank == 0:
        torch.save(model.module.state_dict(), "autoencoder.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    n = torch.cuda.device_count()
    mp.spawn(worker, args=(n,), nprocs=n, join=True)
