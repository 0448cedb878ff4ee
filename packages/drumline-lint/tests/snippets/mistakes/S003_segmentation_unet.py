import argparse
import os
import random
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image
from segmentation_models_pytorch import Unet
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

# torchrun --nproc_per_node=8 segmentation_unet.py --root /mnt/lidc --out /mnt/runs/unet


class SliceDataset(Dataset):
    def __init__(self, root, split):
        self.items = sorted((Path(root) / split).glob("*_img.png"))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, idx):
        p = self.items[idx]
        img = np.asarray(Image.open(p).convert("L"), dtype=np.float32) / 255.0
        msk = np.asarray(Image.open(str(p).replace("_img", "_mask")), dtype=np.float32)
        return torch.from_numpy(img)[None], torch.from_numpy((msk > 0).astype(np.float32))[None]


def dice(logits, target, eps=1e-6):
    prob = logits.sigmoid()
    inter = (prob * target).sum(dim=(1, 2, 3))
    return ((2 * inter + eps) / (prob.sum(dim=(1, 2, 3)) + target.sum(dim=(1, 2, 3)) + eps)).mean()


def run_epoch(model, loader, opt, scaler, device):
    model.train()
    bce = nn.BCEWithLogitsLoss()
    for img, msk in loader:
        img, msk = img.to(device, non_blocking=True), msk.to(device, non_blocking=True)
        opt.zero_grad()
        with torch.autocast("cuda"):
            out = model(img)
            loss = bce(out, msk) + 1 - dice(out, msk)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()


@torch.no_grad()
def validate(model, loader, device):
    model.eval()
    acc = torch.zeros(2, device=device)
    for img, msk in loader:
        img, msk = img.to(device), msk.to(device)
        acc[0] += dice(model(img), msk) * img.size(0)
        acc[1] += img.size(0)
    dist.all_reduce(acc)
    return (acc[0] / acc[1]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--root", required=True)
    ap.add_argument("--out", required=True)
    ap.add_argument("--epochs", type=int, default=60)
    ap.add_argument("--bs", type=int, default=16)
    a = ap.parse_args()

    dist.init_process_group("nccl")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    random.seed(1234 + dist.get_rank())
    os.makedirs(a.out, exist_ok=True)

    train_ds, val_ds = SliceDataset(a.root, "train"), SliceDataset(a.root, "val")
    train_s = DistributedSampler(train_ds, shuffle=True)
    val_s = DistributedSampler(val_ds, shuffle=False)
    train_ld = DataLoader(train_ds, a.bs, sampler=train_s, num_workers=6, pin_memory=True, drop_last=True)
    val_ld = DataLoader(val_ds, a.bs, sampler=val_s, num_workers=6)

    model = Unet("resnet34", encoder_weights=None, in_channels=1, classes=1).to(device)
    model = DistributedDataParallel(model, device_ids=[device.index])
    opt = optim.AdamW(model.parameters(), lr=3e-4)
    scaler = torch.amp.GradScaler("cuda")

    best = 0.0
    for epoch in range(a.epochs):
        train_s.set_epoch(epoch)
        run_epoch(model, train_ld, opt, scaler, device)
        score = validate(model, val_ld, device)
        if score > best:
            best = score
            torch.save(
                {"epoch": epoch, "model": model.module.state_dict(), "opt": opt.state_dict(), "dice": best},
                os.path.join(a.out, "best.pt"),
            )
        if dist.get_rank() == 0:
            print(f"[{epoch:03d}] dice {score:.4f} best {best:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
