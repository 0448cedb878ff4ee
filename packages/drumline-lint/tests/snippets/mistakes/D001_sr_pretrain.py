"""Super-resolution pretraining by iteration count rather than by epoch."""
import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class PatchPairs(Dataset):
    def __init__(self, root):
        self.files = sorted(Path(root).glob("*.pt"))

    def __len__(self):
        return len(self.files)

    def __getitem__(self, i):
        pair = torch.load(self.files[i], map_location="cpu")
        return pair["lr"].float(), pair["hr"].float()


class TinySR(nn.Module):
    def __init__(self, width=64, scale=2):
        super().__init__()
        self.head = nn.Conv2d(3, width, 3, padding=1)
        self.body = nn.Sequential(
            *[nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.ReLU()) for _ in range(6)]
        )
        self.tail = nn.Conv2d(width, 3 * scale**2, 3, padding=1)
        self.up = nn.PixelShuffle(scale)

    def forward(self, x):
        h = self.head(x)
        return self.up(self.tail(h + self.body(h)))


def forever(loader):
    while True:
        for batch in loader:
            yield batch


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--root", required=True)
    ap.add_argument("--iters", type=int, default=300_000)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--out", default="sr.pt")
    args = ap.parse_args()

    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)

    data = PatchPairs(args.root)
    sampler = DistributedSampler(data, shuffle=True, drop_last=True)
    loader = DataLoader(data, batch_size=args.batch, sampler=sampler, num_workers=6,
                        pin_memory=True, drop_last=True)
    model = DDP(TinySR().to(device), device_ids=[local_rank])
    opt = torch.optim.Adam(model.parameters(), lr=2e-4)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, args.iters)

    stream = forever(loader)
    for it in range(args.iters):
        lr_img, hr_img = next(stream)
        lr_img = lr_img.to(device, non_blocking=True)
        hr_img = hr_img.to(device, non_blocking=True)
        loss = F.l1_loss(model(lr_img), hr_img)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        sched.step()
        if it % 500 == 0 and dist.get_rank() == 0:
            print(f"{it:7d} l1 {loss.item():.4f}", flush=True)

    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), args.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
