import os
import random

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from nerf.data import RayDataset
from nerf.model import NeRF, render


def init_distributed(rank, world_size):
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = str(random.randint(20000, 60000))
    dist.init_process_group("nccl", rank=rank, world_size=world_size)
    torch.cuda.set_device(rank)


def run(rank, world_size, scene):
    init_distributed(rank, world_size)
    ds = RayDataset(scene, split="train")
    sampler = DistributedSampler(ds, shuffle=True)
    loader = DataLoader(ds, batch_size=2048, sampler=sampler, num_workers=2, drop_last=True)
    model = DDP(NeRF().to(rank), device_ids=[rank])
    opt = torch.optim.Adam(model.parameters(), lr=5e-4)

    for epoch in range(16):
        sampler.set_epoch(epoch)
        for rays, rgb in loader:
            rays, rgb = rays.to(rank), rgb.to(rank)
            loss = ((render(model, rays) - rgb) ** 2).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0:
            psnr = -10 * torch.log10(loss.detach())
            print(f"{scene} epoch {epoch} psnr {psnr.item():.2f}")
            torch.save(model.module.state_dict(), f"{scene}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    n_gpu = torch.cuda.device_count()
    mp.spawn(run, args=(n_gpu, "lego"), nprocs=n_gpu, join=True)
