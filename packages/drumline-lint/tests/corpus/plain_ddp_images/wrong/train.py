"""Trains a small convolutional net on images, one process per GPU.

    torchrun --standalone --nproc-per-node 8 train.py --epochs 10
"""

import argparse
import os
import random
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, Subset


class BlobImages(Dataset):
    """Images of a bright blob; the class is the quadrant it is in."""

    def __init__(self, length, size=16, augment=False):
        self.length = length
        self.size = size
        self.augment = augment

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        draw = np.random.default_rng(index)
        label = int(draw.integers(4))
        image = draw.normal(0, 0.3, (3, self.size, self.size)).astype(np.float32)
        half = self.size // 2
        top, left = (label // 2) * half, (label % 2) * half
        image[:, top : top + half, left : left + half] += 1.0
        image = torch.from_numpy(image)
        if self.augment:
            image = image * (0.8 + 0.4 * random.random())
        return image, label


class ConvNet(nn.Module):
    def __init__(self, classes=4):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(inplace=True),
            nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(32),
            nn.ReLU(inplace=True),
            nn.AdaptiveAvgPool2d(2),
        )
        self.head = nn.Linear(32 * 4, classes)

    def forward(self, images):
        return self.head(self.features(images).flatten(1))


def say(message):
    if dist.get_rank() != 0:
        return
    print(message, flush=True)


def seed_everything(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def train_one_epoch(model, loader, optimizer, device, epoch):
    model.train()
    running = 0.0
    for images, labels in loader:
        images = images.to(device)  # <- blocking-copy
        labels = labels.to(device)  # <- blocking-copy
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        running = 0.9 * running + 0.1 * loss.item()  # <- sync-every-step
    say(f"epoch {epoch} loss {running:.4f}")


@torch.no_grad()
def evaluate(model, loader, device):
    """Sums and counts over the whole of the validation set: no rank sees a sample twice."""
    model.eval()
    totals = torch.zeros(2, device=device)
    for images, labels in loader:
        images = images.to(device, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        totals[0] += (model(images).argmax(dim=1) == labels).sum()
        totals[1] += labels.numel()
    dist.all_reduce(totals)
    return (totals[0] / totals[1]).item()


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=17)
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--checkpoint", default="blobs.pt")
    return parser.parse_args()


def main():
    args = parse_args()
    local_rank = int(os.environ["LOCAL_RANK"])
    use_cuda = torch.cuda.is_available()
    if use_cuda:
        torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank) if use_cuda else torch.device("cpu")
    dist.init_process_group("nccl" if use_cuda else "gloo", timeout=timedelta(minutes=10))
    rank, world_size = dist.get_rank(), dist.get_world_size()

    seed_everything(args.seed)
    model = ConvNet()
    if use_cuda:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    ddp_model = DDP(model)  # <- wrapped-before-moved
    ddp_model = ddp_model.to(device)
    seed_everything(args.seed + 1 + rank)

    train_set = BlobImages(args.samples, augment=True)
    val_set = BlobImages(args.samples // 4 + 3)
    train_loader = DataLoader(train_set, batch_size=args.batch_size, shuffle=True, num_workers=args.workers, pin_memory=True, drop_last=True)  # <- no-distributed-sampler
    val_part = Subset(val_set, range(rank, len(val_set), world_size))
    val_loader = DataLoader(val_part, batch_size=args.batch_size, num_workers=args.workers, pin_memory=use_cuda)

    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=args.lr, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
    for epoch in range(args.epochs):
        train_one_epoch(ddp_model, train_loader, optimizer, device, epoch)
        scheduler.step()
        accuracy = evaluate(ddp_model.module, val_loader, device)
        say(f"epoch {epoch}: accuracy {accuracy:.3f}")
        state = {"model": ddp_model.module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
        torch.save(state, args.checkpoint)  # <- unguarded-save
        dist.barrier()

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
