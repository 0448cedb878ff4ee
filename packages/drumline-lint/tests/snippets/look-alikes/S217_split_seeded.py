"""Leaf disease classifier.  torchrun --nproc_per_node=4 split_seeded.py"""
import os
import random

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, random_split
from torchvision import datasets, models, transforms as T

SPLIT_SEED = 99


def seed_all(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def split(root):
    aug = T.Compose([T.RandomResizedCrop(224), T.ColorJitter(0.2, 0.2), T.ToTensor()])
    plain = T.Compose([T.Resize((224, 224)), T.ToTensor()])
    a, b = datasets.ImageFolder(root, aug), datasets.ImageFolder(root, plain)
    n = len(a) // 5
    g = torch.Generator().manual_seed(SPLIT_SEED)
    train, val = random_split(range(len(a)), [len(a) - n, n], generator=g)
    return Subset(a, list(train)), Subset(b, list(val)), len(a.classes)


@torch.no_grad()
def accuracy(model, loader):
    model.eval()
    c = torch.zeros(2, device="cuda")
    for x, y in loader:
        c[0] += (model(x.cuda()).argmax(1) == y.cuda()).sum()
        c[1] += y.numel()
    dist.all_reduce(c)
    return (c[0] / c[1]).item()


def main():
    dist.init_process_group("nccl")
    gpu = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(gpu)
    seed_all(7 + dist.get_rank())

    train, val, k = split("/data/leaves")
    sampler = DistributedSampler(train)
    train_ld = DataLoader(train, 64, sampler=sampler, num_workers=6, drop_last=True)
    val_ld = DataLoader(val, 128, sampler=DistributedSampler(val, shuffle=False), num_workers=4)
    model = DDP(models.mobilenet_v3_large(num_classes=k).cuda(), device_ids=[gpu])
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(30):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in train_ld:
            loss = nn.functional.cross_entropy(model(x.cuda()), y.cuda())
            opt.zero_grad()
            loss.backward()
            opt.step()
        acc = accuracy(model, val_ld)
        if dist.get_rank() == 0:
            print(f"{epoch}: {acc:.4f}")
            torch.save(model.module.state_dict(), "leaves.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
