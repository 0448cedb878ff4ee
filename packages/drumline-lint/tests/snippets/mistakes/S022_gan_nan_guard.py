"""Super-resolution generator with L1 + perceptual loss; 4 GPUs via torchrun."""
import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from torchvision.models import VGG19_Weights, vgg19

from div2k import Div2KPatches


class ResBlock(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.f = nn.Sequential(nn.Conv2d(c, c, 3, padding=1), nn.PReLU(), nn.Conv2d(c, c, 3, padding=1))

    def forward(self, x):
        return x + 0.1 * self.f(x)


class EDSR(nn.Module):
    def __init__(self, c=64, blocks=16, scale=4):
        super().__init__()
        self.head = nn.Conv2d(3, c, 3, padding=1)
        self.body = nn.Sequential(*[ResBlock(c) for _ in range(blocks)])
        self.tail = nn.Sequential(nn.Conv2d(c, 3 * scale ** 2, 3, padding=1), nn.PixelShuffle(scale))

    def forward(self, x):
        h = self.head(x)
        return self.tail(h + self.body(h))


def build_perceptual(device):
    vgg = vgg19(weights=VGG19_Weights.DEFAULT).features[:36].eval().to(device)
    for p in vgg.parameters():
        p.requires_grad_(False)
    return vgg


def main(root):
    dist.init_process_group("nccl")
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    device = torch.device("cuda", local)
    rank0 = dist.get_rank() == 0

    ds = Div2KPatches(root, scale=4, patch=192)
    sampler = DistributedSampler(ds, shuffle=True)
    loader = DataLoader(ds, batch_size=16, sampler=sampler, num_workers=8, pin_memory=True, drop_last=True)
    model = DDP(EDSR().to(device), device_ids=[local])
    vgg = build_perceptual(device)
    opt = torch.optim.Adam(model.parameters(), lr=2e-4, betas=(0.9, 0.99))

    skipped = 0
    for epoch in range(300):
        sampler.set_epoch(epoch)
        for lo, hi in loader:
            lo, hi = lo.to(device, non_blocking=True), hi.to(device, non_blocking=True)
            opt.zero_grad(set_to_none=True)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                sr = model(lo)
                loss = F.l1_loss(sr, hi) + 0.006 * F.mse_loss(vgg(sr), vgg(hi))
            if not torch.isfinite(loss):
                skipped += 1
                continue
            loss.backward()
            opt.step()
        if rank0:
            print(f"epoch {epoch} loss {loss.item():.4f} skipped {skipped}")
            torch.save(model.module.state_dict(), "edsr_x4.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
