import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from yacs.config import CfgNode as CN

_C = CN()
_C.DATA = "data/div2k_patches.pt"
_C.OUT = "srgan.pt"
_C.BATCH = 16
_C.EPOCHS = 200
_C.ADV = 5e-3
_C.SEED = 0


class Upscaler(nn.Module):
    def __init__(self, ch=64, blocks=8):
        super().__init__()
        self.head = nn.Conv2d(3, ch, 3, padding=1)
        self.body = nn.ModuleList(
            nn.Sequential(nn.Conv2d(ch, ch, 3, padding=1), nn.PReLU(), nn.Conv2d(ch, ch, 3, padding=1))
            for _ in range(blocks)
        )
        self.up = nn.Sequential(nn.Conv2d(ch, ch * 16, 3, padding=1), nn.PixelShuffle(4), nn.Conv2d(ch, 3, 3, padding=1))

    def forward(self, x):
        h = self.head(x)
        for b in self.body:
            h = h + b(h)
        return self.up(h)


def critic(ch=64):
    mods, c = [], 3
    for k in (ch, ch * 2, ch * 4, ch * 8):
        mods += [nn.Conv2d(c, k, 4, 2, 1), nn.LeakyReLU(0.2)]
        c = k
    return nn.Sequential(*mods, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(c, 1))


def main(cfg):
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    dist.init_process_group("nccl")
    torch.manual_seed(cfg.SEED + dist.get_rank())
    blob = torch.load(cfg.DATA, map_location="cpu", weights_only=True)
    data = TensorDataset(blob["lr"], blob["hr"])
    sampler = DistributedSampler(data)
    loader = DataLoader(data, cfg.BATCH, sampler=sampler, num_workers=4, drop_last=True)
    G = DDP(Upscaler().cuda(), device_ids=[local])
    D = DDP(critic().cuda(), device_ids=[local])
    opt_g = torch.optim.Adam(G.parameters(), 1e-4)
    opt_d = torch.optim.Adam(D.parameters(), 1e-4)
    scaler = torch.amp.GradScaler("cuda")

    for epoch in range(cfg.EPOCHS):
        sampler.set_epoch(epoch)
        for lr, hr in loader:
            lr, hr = lr.cuda(non_blocking=True), hr.cuda(non_blocking=True)
            D.requires_grad_(False)
            with torch.autocast("cuda", dtype=torch.float16):
                sr = G(lr)
                g_loss = F.l1_loss(sr, hr) + cfg.ADV * F.softplus(-D(sr)).mean()
            opt_g.zero_grad(set_to_none=True)
            scaler.scale(g_loss).backward()
            scaler.step(opt_g)
            scaler.update()
            D.requires_grad_(True)
            with torch.autocast("cuda", dtype=torch.float16):
                score = D(torch.cat([hr, sr.detach()]))
                real, fake = score.chunk(2)
                d_loss = F.softplus(-real).mean() + F.softplus(fake).mean()
            opt_d.zero_grad(set_to_none=True)
            scaler.scale(d_loss).backward()
            scaler.step(opt_d)
            scaler.update()
        if dist.get_rank() == 0:
            print(epoch, g_loss.item(), d_loss.item())
            torch.save({"g": G.module.state_dict(), "d": D.module.state_dict(), "scaler": scaler.state_dict()}, cfg.OUT)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(_C.clone())
