"""ViT-S/16 on ImageNet-1k.  torchrun --nproc-per-node 8 train_vit.py --data /datasets/in1k"""
import argparse
import os
import time

import timm
import torch
import torch.distributed as dist
from timm.data import Mixup, create_transform
from timm.loss import SoftTargetCrossEntropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from torchvision.datasets import ImageFolder

parser = argparse.ArgumentParser()
parser.add_argument("--data", required=True)
parser.add_argument("--epochs", default=300, type=int)
parser.add_argument("--warmup-epochs", default=5, type=int)
parser.add_argument("--batch-size", default=128, type=int, help="batch size per process")
parser.add_argument("--lr", default=1e-3, type=float)
parser.add_argument("--wd", default=0.05, type=float)
parser.add_argument("-j", "--workers", default=10, type=int)
parser.add_argument("--output", default="./output")


def adjust_lr(optimizer, it, warmup, total, base):
    if it < warmup:
        lr = base * it / warmup
    else:
        lr = 0.5 * base * (1 + torch.cos(torch.tensor((it - warmup) / (total - warmup) * 3.14159)).item())
    for g in optimizer.param_groups:
        g["lr"] = lr
    return lr


def train_one_epoch(model, loader, mixup, criterion, optimizer, epoch, args, local_rank, is_main):
    model.train()
    start = time.time()
    for i, (x, y) in enumerate(loader):
        lr = adjust_lr(optimizer, epoch * len(loader) + i, args.warmup_epochs * len(loader),
                       args.epochs * len(loader), args.lr)
        x = x.cuda(local_rank, non_blocking=True)
        y = y.cuda(local_rank, non_blocking=True)
        x, y = mixup(x, y)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = criterion(model(x), y)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if is_main and i % 50 == 0:
            rate = (i + 1) * args.batch_size / (time.time() - start)
            print(f"{epoch:03d} {i:05d} loss {loss.item():.3f} lr {lr:.2e} {rate:.0f} img/s/gpu")


def main():
    args = parser.parse_args()
    dist.init_process_group(backend="nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    is_main = dist.get_rank() == 0

    transform = create_transform(224, is_training=True, auto_augment="rand-m9-mstd0.5-inc1", re_prob=0.25)
    train_set = ImageFolder(os.path.join(args.data, "train"), transform)
    sampler = DistributedSampler(train_set, shuffle=True, seed=17)
    loader = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler, num_workers=args.workers,
                        pin_memory=True, drop_last=True, persistent_workers=True)

    model = timm.create_model("vit_small_patch16_224", num_classes=1000, drop_path_rate=0.1).cuda(local_rank)
    model = DistributedDataParallel(model, device_ids=[local_rank], gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=args.wd)
    mixup = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, num_classes=1000)
    criterion = SoftTargetCrossEntropy()

    if is_main:
        os.makedirs(args.output, exist_ok=True)
    for epoch in range(args.epochs):
        train_one_epoch(model, loader, mixup, criterion, optimizer, epoch, args, local_rank, is_main)
        if is_main:
            torch.save({"model": model.module.state_dict(), "opt": optimizer.state_dict(), "epoch": epoch},
                       os.path.join(args.output, "checkpoint.pth"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
