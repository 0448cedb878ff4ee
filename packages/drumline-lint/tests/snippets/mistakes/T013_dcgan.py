import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.utils.data as data
import torchvision
import torchvision.transforms as T
from torch.nn.parallel import DistributedDataParallel as DDP


def gblock(i, o, k=4, s=2, p=1):
    return [nn.ConvTranspose2d(i, o, k, s, p, bias=False), nn.BatchNorm2d(o), nn.ReLU(True)]


def dblock(i, o):
    return [nn.Conv2d(i, o, 4, 2, 1, bias=False), nn.InstanceNorm2d(o), nn.LeakyReLU(0.2, True)]


class Generator(nn.Module):
    def __init__(self, nz=128, f=64):
        super().__init__()
        self.main = nn.Sequential(*gblock(nz, f * 8, 4, 1, 0), *gblock(f * 8, f * 4), *gblock(f * 4, f * 2),
                                  *gblock(f * 2, f), nn.ConvTranspose2d(f, 3, 4, 2, 1), nn.Tanh())

    def forward(self, z):
        return self.main(z[:, :, None, None])


class Discriminator(nn.Module):
    def __init__(self, f=64):
        super().__init__()
        self.main = nn.Sequential(nn.Conv2d(3, f, 4, 2, 1), nn.LeakyReLU(0.2, True), *dblock(f, f * 2),
                                  *dblock(f * 2, f * 4), *dblock(f * 4, f * 8), nn.Conv2d(f * 8, 1, 4, 1, 0))

    def forward(self, x):
        return self.main(x).flatten()


def main(opt):
    local_rank = int(os.environ["LOCAL_RANK"])
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    torch.manual_seed(opt.seed + rank)
    dev = torch.device("cuda", local_rank)

    tf = T.Compose([T.Resize(64), T.CenterCrop(64), T.ToTensor(), T.Normalize([0.5] * 3, [0.5] * 3)])
    ds = torchvision.datasets.ImageFolder(opt.root, tf)
    sampler = data.DistributedSampler(ds, drop_last=True)
    loader = data.DataLoader(ds, opt.batch, sampler=sampler, num_workers=4, drop_last=True, pin_memory=True)

    netG = DDP(Generator(opt.nz).to(dev), device_ids=[local_rank], broadcast_buffers=False)
    netD = DDP(Discriminator().to(dev), device_ids=[local_rank])
    optG = torch.optim.Adam(netG.parameters(), 2e-4, betas=(0.5, 0.999))
    optD = torch.optim.Adam(netD.parameters(), 2e-4, betas=(0.5, 0.999))
    fixed = torch.randn(64, opt.nz, device=dev)

    for epoch in range(opt.epochs):
        sampler.set_epoch(epoch)
        for real, _ in loader:
            real = real.to(dev, non_blocking=True)
            z = torch.randn(real.size(0), opt.nz, device=dev)

            for p in netD.parameters():
                p.requires_grad_(True)
            with torch.no_grad():
                fake = netG(z)
            scores = netD(torch.cat([real, fake]))
            s_real, s_fake = scores.chunk(2)
            lossD = torch.relu(1 - s_real).mean() + torch.relu(1 + s_fake).mean()
            optD.zero_grad(set_to_none=True)
            lossD.backward()
            optD.step()

            for p in netD.parameters():
                p.requires_grad_(False)
            lossG = -netD.module(netG.module(z)).mean()
            optG.zero_grad(set_to_none=True)
            lossG.backward()
            optG.step()

        if rank == 0:
            with torch.no_grad():
                grid = netG.module(fixed)
            torchvision.utils.save_image(grid, f"{opt.out}/{epoch:03d}.png", normalize=True)
            torch.save(netG.module.state_dict(), f"{opt.out}/G.pt")
            print(f"[{epoch}] D {lossD.item():.3f} G {lossG.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    ap = argparse.ArgumentParser(description="torchrun --nproc_per_node=N Q013_dcgan.py --root celeba")
    ap.add_argument("--root", required=True)
    ap.add_argument("--out", default=".")
    ap.add_argument("--nz", type=int, default=128)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--epochs", type=int, default=25)
    ap.add_argument("--seed", type=int, default=0)
    main(ap.parse_args())
