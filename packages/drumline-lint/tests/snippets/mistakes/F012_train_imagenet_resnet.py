"""ResNet-50 on ImageNet. torchrun --nproc_per_node=8 train_imagenet_resnet.py /data/imagenet"""
import argparse
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torchvision.models as models
import torchvision.transforms as T
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchvision.datasets import ImageFolder

NORM = T.Normalize(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225])


def build_loaders(root, batch_size, workers):
    train_tf = T.Compose([T.RandomResizedCrop(224), T.RandomHorizontalFlip(), T.ToTensor(), NORM])
    val_tf = T.Compose([T.Resize(256), T.CenterCrop(224), T.ToTensor(), NORM])
    train_set = ImageFolder(os.path.join(root, "train"), train_tf)
    val_set = ImageFolder(os.path.join(root, "val"), val_tf)
    train_sampler = DistributedSampler(train_set, shuffle=True)
    val_sampler = DistributedSampler(val_set, shuffle=False)
    train_loader = DataLoader(train_set, batch_size, sampler=train_sampler, num_workers=workers,
                              pin_memory=True, drop_last=True)
    val_loader = DataLoader(val_set, batch_size, sampler=val_sampler, num_workers=workers, pin_memory=True)
    return train_loader, val_loader


def train_one_epoch(model, loader, criterion, optimizer, device):
    model.train()
    for images, target in loader:
        images, target = images.to(device, non_blocking=True), target.to(device, non_blocking=True)
        loss = criterion(model(images), target)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()


@torch.no_grad()
def validate(model, loader, device):
    model.eval()
    stats = torch.zeros(2, device=device)
    for images, target in loader:
        images, target = images.to(device), target.to(device)
        stats[0] += (model(images).argmax(1) == target).sum()
        stats[1] += target.numel()
    dist.all_reduce(stats)
    return (stats[0] / stats[1]).item()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("data")
    p.add_argument("--epochs", type=int, default=90)
    p.add_argument("-b", "--batch-size", type=int, default=64)
    p.add_argument("--lr", type=float, default=0.2)
    p.add_argument("-j", "--workers", type=int, default=8)
    args = p.parse_args()

    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)

    train_loader, val_loader = build_loaders(args.data, args.batch_size, args.workers)
    model = DDP(models.resnet50().to(device), device_ids=[local_rank])
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [30, 60, 80])

    best = 0.0
    for epoch in range(args.epochs):
        start = time.time()
        train_one_epoch(model, train_loader, criterion, optimizer, device)
        acc = validate(model, val_loader, device)
        scheduler.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: acc {acc:.4f} ({time.time() - start:.0f}s)", flush=True)
            if acc > best:
                best = acc
                torch.save(model.module.state_dict(), "resnet50_best.pth")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
