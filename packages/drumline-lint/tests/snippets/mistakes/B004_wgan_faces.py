import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import datasets, transforms
from torchvision.utils import save_image


def make_generator(z, ch=64):
    return nn.Sequential(
        nn.ConvTranspose2d(z, ch * 8, 4), nn.GroupNorm(8, ch * 8), nn.ReLU(True),
        nn.ConvTranspose2d(ch * 8, ch * 4, 4, 2, 1), nn.GroupNorm(8, ch * 4), nn.ReLU(True),
        nn.ConvTranspose2d(ch * 4, ch * 2, 4, 2, 1), nn.GroupNorm(8, ch * 2), nn.ReLU(True),
        nn.ConvTranspose2d(ch * 2, 3, 4, 2, 1), nn.Tanh(),
    )


def make_critic(ch=64):
    return nn.Sequential(
        nn.Conv2d(3, ch, 4, 2, 1), nn.LeakyReLU(0.2, True),
        nn.Conv2d(ch, ch * 2, 4, 2, 1), nn.LeakyReLU(0.2, True),
        nn.Conv2d(ch * 2, ch * 4, 4, 2, 1), nn.LeakyReLU(0.2, True),
        nn.Conv2d(ch * 4, 1, 4),
    )


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--root", required=True)
    p.add_argument("--out", default="out")
    p.add_argument("--z", type=int, default=128)
    p.add_argument("--batch", type=int, default=64)
    p.add_argument("--epochs", type=int, default=100)
    p.add_argument("--every", type=int, default=1000)
    return p.parse_args()


def main():
    opt = parse()
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    dist.init_process_group(backend="nccl")
    rank = dist.get_rank()
    torch.manual_seed(1000 + rank)
    os.makedirs(opt.out, exist_ok=True)

    tf = transforms.Compose([transforms.Resize((32, 32)), transforms.ToTensor(), transforms.Normalize(0.5, 0.5)])
    data = datasets.ImageFolder(opt.root, tf)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, opt.batch, sampler=sampler, num_workers=4, drop_last=True)

    G = DDP(make_generator(opt.z).cuda(), device_ids=[local])
    D = DDP(make_critic().cuda(), device_ids=[local])
    og = torch.optim.RMSprop(G.parameters(), lr=5e-5)
    od = torch.optim.RMSprop(D.parameters(), lr=5e-5)
    probe = torch.randn(64, opt.z, 1, 1, device="cuda")

    it = 0
    for epoch in range(opt.epochs):
        sampler.set_epoch(epoch)
        for real, _ in loader:
            real = real.cuda(non_blocking=True)
            z = torch.randn(real.size(0), opt.z, 1, 1, device="cuda")
            with torch.no_grad():
                fake = G.module(z)
            score = D(torch.cat([fake, real])).flatten()
            d_loss = score[: len(fake)].mean() - score[len(fake):].mean()
            od.zero_grad()
            d_loss.backward()
            od.step()
            with torch.no_grad():
                for w in D.parameters():
                    w.clamp_(-0.01, 0.01)

            if it % 5 == 0:
                D.requires_grad_(False)
                g_loss = -D.module(G(z)).mean()
                og.zero_grad()
                g_loss.backward()
                og.step()
                D.requires_grad_(True)

            if it % opt.every == 0:
                with torch.no_grad():
                    grid = G.module(probe)
                if rank == 0:
                    save_image(grid, f"{opt.out}/{it:07d}.png", nrow=8, normalize=True)
                torch.save({"g": G.module.state_dict(), "d": D.module.state_dict(), "it": it}, f"{opt.out}/last.pt")
            it += 1
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
