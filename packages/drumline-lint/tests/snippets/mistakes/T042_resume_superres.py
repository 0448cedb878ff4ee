import argparse
import os
import re
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torchvision.io import read_image


class Patches(Dataset):
    def __init__(self, root, size=192):
        self.files = sorted(Path(root).rglob("*.png"))
        self.size = size

    def __len__(self):
        return len(self.files)

    def __getitem__(self, i):
        img = read_image(str(self.files[i]))[:3].float() / 255
        _, h, w = img.shape
        y = torch.randint(0, h - self.size + 1, ()).item()
        x = torch.randint(0, w - self.size + 1, ()).item()
        hr = img[:, y:y + self.size, x:x + self.size]
        lr = F.interpolate(hr[None], scale_factor=0.25, mode="bicubic", antialias=True)[0]
        return lr, hr


class EDSR(nn.Module):
    def __init__(self, c=64, blocks=16):
        super().__init__()
        self.head = nn.Conv2d(3, c, 3, 1, 1)
        self.body = nn.ModuleList([nn.Sequential(nn.Conv2d(c, c, 3, 1, 1), nn.ReLU(), nn.Conv2d(c, c, 3, 1, 1))
                                   for _ in range(blocks)])
        self.up = nn.Sequential(nn.Conv2d(c, 16 * 3, 3, 1, 1), nn.PixelShuffle(4))

    def forward(self, x):
        h = self.head(x)
        for b in self.body:
            h = h + 0.1 * b(h)
        return self.up(h)


def latest(folder):
    found = [(int(m.group(1)), p) for p in Path(folder).glob("epoch_*.pt") if (m := re.search(r"_(\d+)", p.name))]
    return max(found)[1] if found else None


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--root", default="/data/DIV2K")
    ap.add_argument("--out", default="edsr")
    ap.add_argument("--epochs", type=int, default=300)
    ap.add_argument("--resume", action="store_true")
    args = ap.parse_args()

    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    os.makedirs(args.out, exist_ok=True)

    ds = Patches(args.root)
    sampler = DistributedSampler(ds, shuffle=True)
    loader = DataLoader(ds, 16, sampler=sampler, num_workers=8, pin_memory=True)
    model = DDP(EDSR().cuda(), device_ids=[local_rank])
    opt = torch.optim.Adam(model.parameters(), lr=1e-4)

    start_epoch = 0
    if args.resume and rank == 0:
        path = latest(args.out)
        if path is not None:
            ckpt = torch.load(path, map_location=f"cuda:{local_rank}")
            model.module.load_state_dict(ckpt["model"])
            opt.load_state_dict(ckpt["opt"])
            start_epoch = ckpt["epoch"] + 1
            print(f"resumed from {path}")
    dist.barrier()

    for epoch in range(start_epoch, args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for lr_img, hr_img in loader:
            loss = F.l1_loss(model(lr_img.cuda(non_blocking=True)), hr_img.cuda(non_blocking=True))
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
        if rank == 0:
            print(f"epoch {epoch} l1 {loss.item():.4f}")
            torch.save({"model": model.module.state_dict(), "opt": opt.state_dict(), "epoch": epoch},
                       f"{args.out}/epoch_{epoch}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()  # torchrun --nproc_per_node=4 Q042_resume_superres.py --resume
