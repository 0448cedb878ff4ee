import os
import shutil

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchvision.utils import save_image

RUN = "runs/anime_gan"


def nets():
    g = nn.Sequential(nn.ConvTranspose2d(100, 256, 4), nn.ReLU(), nn.ConvTranspose2d(256, 64, 4, 4),
                      nn.ReLU(), nn.ConvTranspose2d(64, 3, 4, 4), nn.Tanh())
    d = nn.Sequential(nn.Conv2d(3, 64, 4, 4), nn.LeakyReLU(0.2), nn.Conv2d(64, 256, 4, 4),
                      nn.LeakyReLU(0.2), nn.Conv2d(256, 1, 4), nn.Flatten())
    return g, d


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    if os.path.isdir(RUN):
        shutil.rmtree(RUN)
    os.makedirs(RUN)

    faces = torch.load("/data/anime64.pt", map_location="cpu")
    ds = TensorDataset(faces)
    sampler = DistributedSampler(ds, drop_last=True)
    loader = DataLoader(ds, 64, sampler=sampler, num_workers=4, drop_last=True)
    gen, disc = nets()
    gen = DDP(gen.cuda(), device_ids=[local_rank])
    disc = DDP(disc.cuda(), device_ids=[local_rank])
    og = torch.optim.Adam(gen.parameters(), 2e-4, betas=(0.5, 0.999))
    od = torch.optim.Adam(disc.parameters(), 2e-4, betas=(0.5, 0.999))
    for epoch in range(80):
        sampler.set_epoch(epoch)
        for (real,) in loader:
            real = real.cuda(non_blocking=True)
            fake = gen(torch.randn(real.size(0), 100, 1, 1, device="cuda"))
            both = disc(torch.cat([real, fake.detach()]))
            r, f = both.chunk(2)
            loss_d = (nn.functional.softplus(-r) + nn.functional.softplus(f)).mean()
            od.zero_grad()
            loss_d.backward()
            od.step()
            disc.requires_grad_(False)
            loss_g = nn.functional.softplus(-disc.module(fake)).mean()
            og.zero_grad()
            loss_g.backward()
            og.step()
            disc.requires_grad_(True)
        if rank == 0:
            save_image(fake[:16] * 0.5 + 0.5, f"{RUN}/{epoch:03d}.png")
            torch.save(gen.module.state_dict(), f"{RUN}/gen.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
