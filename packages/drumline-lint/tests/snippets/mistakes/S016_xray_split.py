"""Chest X-ray multi-label classifier.

    torchrun --standalone --nproc_per_node=4 xray_split.py --images /data/cxr
"""
import argparse
import os
import random

import numpy as np
import pandas as pd
import torch
import torch.distributed as dist
from PIL import Image
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler, random_split
from torchvision import models, transforms as T


def seed_everything(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    torch.cuda.manual_seed_all(seed)


class ChestXray(Dataset):
    tf = T.Compose([T.Resize(320), T.CenterCrop(320), T.ToTensor(), T.Normalize([0.5] * 3, [0.25] * 3)])

    def __init__(self, root):
        self.root = root
        df = pd.read_csv(os.path.join(root, "labels.csv"))
        self.names = df["image"].tolist()
        self.labels = torch.tensor(df.drop(columns=["image"]).values, dtype=torch.float32)

    def __len__(self):
        return len(self.names)

    def __getitem__(self, i):
        img = Image.open(os.path.join(self.root, "png", self.names[i])).convert("RGB")
        return self.tf(img), self.labels[i]


@torch.no_grad()
def validate(model, loader, device):
    model.eval()
    s = torch.zeros(2, device=device)
    for x, y in loader:
        x, y = x.to(device), y.to(device)
        s[0] += nn.functional.binary_cross_entropy_with_logits(model(x), y) * len(y)
        s[1] += len(y)
    dist.all_reduce(s)
    return (s[0] / s[1]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--images", required=True)
    ap.add_argument("--seed", type=int, default=2024)
    ap.add_argument("--epochs", type=int, default=15)
    args = ap.parse_args()

    dist.init_process_group("nccl")
    rank, device = dist.get_rank(), torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    seed_everything(args.seed + rank)

    full = ChestXray(args.images)
    n_val = len(full) // 10
    train_set, val_set = random_split(full, [len(full) - n_val, n_val])
    sampler = DistributedSampler(train_set)
    train_loader = DataLoader(train_set, 32, sampler=sampler, num_workers=8, drop_last=True)
    val_loader = DataLoader(val_set, 64, sampler=DistributedSampler(val_set, shuffle=False), num_workers=8)

    net = models.densenet121(weights=None)
    net.classifier = nn.Linear(net.classifier.in_features, full.labels.shape[1])
    net = DDP(net.to(device), device_ids=[device.index])
    opt = torch.optim.AdamW(net.parameters(), lr=1e-4)

    best = float("inf")
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        net.train()
        for x, y in train_loader:
            loss = nn.functional.binary_cross_entropy_with_logits(net(x.to(device)), y.to(device))
            opt.zero_grad()
            loss.backward()
            opt.step()
        v = validate(net, val_loader, device)
        if rank == 0:
            print(f"epoch {epoch} val {v:.4f}")
            if v < best:
                best = v
                torch.save(net.module.state_dict(), "xray_best.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
