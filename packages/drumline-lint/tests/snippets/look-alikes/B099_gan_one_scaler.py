import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import datasets, transforms
from yacs.config import CfgNode as CN

_C = CN(dict(ROOT="data/anime", OUT="gan.pt", Z=128, BATCH=64, EPOCHS=80, LR=2e-4, SEED=3))


def generator(z, ch=64):
    return nn.Sequential(
        nn.ConvTranspose2d(z, ch * 4, 4), nn.GroupNorm(8, ch * 4), nn.ReLU(),
        nn.ConvTranspose2d(ch * 4, ch * 2, 4, 2, 1), nn.GroupNorm(8, ch * 2), nn.ReLU(),
        nn.ConvTranspose2d(ch * 2, ch, 4, 2, 1), nn.GroupNorm(8, ch), nn.ReLU(),
        nn.ConvTranspose2d(ch, 3, 4, 2, 1), nn.Tanh(),
    )


def discriminator(ch=64):
    return nn.Sequential(
        nn.Conv2d(3, ch, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(ch, ch * 2, 4, 2, 1), nn.LeakyReLU(0.2),
        nn.Conv2d(ch * 2, ch * 4, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(ch * 4, 1, 4), nn.Flatten(),
    )


def main(cfg):
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    rank = dist.get_rank()
    torch.manual_seed(cfg.SEED + rank)
    tf = transforms.Compose([transforms.Resize((32, 32)), transforms.ToTensor(), transforms.Normalize(0.5, 0.5)])
    data = datasets.ImageFolder(cfg.ROOT, tf)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, cfg.BATCH, sampler=sampler, num_workers=4, drop_last=True)
    G = DDP(generator(cfg.Z).to(device), device_ids=[local_rank], broadcast_buffers=False)
    D = DDP(discriminator().to(device), device_ids=[local_rank], broadcast_buffers=False)
    opt_g = torch.optim.Adam(G.parameters(), cfg.LR, (0.0, 0.99))
    opt_d = torch.optim.Adam(D.parameters(), cfg.LR, (0.0, 0.99))
    scaler = torch.amp.GradScaler("cuda")
    for epoch in range(cfg.EPOCHS):
        sampler.set_epoch(epoch)
        stat = torch.zeros(3, device=device)
        for real, _ in loader:
            real = real.to(device, non_blocking=True)
            z = torch.randn(len(real), cfg.Z, 1, 1, device=device)
            with torch.autocast("cuda", dtype=torch.float16):
                fake = G(z)
                real_score, fake_score = D(torch.cat([real, fake.detach()])).chunk(2)
                d_loss = F.softplus(-real_score).mean() + F.softplus(fake_score).mean()
            opt_d.zero_grad(set_to_none=True)
            scaler.scale(d_loss).backward()
            scaler.step(opt_d)
            D.requires_grad_(False)
            with torch.autocast("cuda", dtype=torch.float16):
                g_loss = F.softplus(-D(fake)).mean()
            opt_g.zero_grad(set_to_none=True)
            scaler.scale(g_loss).backward()
            scaler.step(opt_g)
            D.requires_grad_(True)
            scaler.update()
            stat += torch.stack([d_loss.detach(), g_loss.detach(), torch.ones_like(d_loss)])
        dist.all_reduce(stat)
        if rank == 0:
            print(f"epoch {epoch} D {(stat[0] / stat[2]).item():.3f} G {(stat[1] / stat[2]).item():.3f}")
            torch.save({"G": G.module.state_dict(), "D": D.module.state_dict(), "og": opt_g.state_dict(),
                        "od": opt_d.state_dict(), "scaler": scaler.state_dict(), "epoch": epoch}, cfg.OUT)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(_C.clone())
