"""Classifies pictures of a folder. Alone, or one process per GPU under torchrun."""

import argparse
import os
import shutil
import time
from datetime import timedelta

import numpy as np
import torch
import torch.backends.cudnn as cudnn
import torch.distributed as dist
import torch.nn as nn
import torch.nn.parallel
import torch.optim
import torch.utils.data
import torch.utils.data.distributed
from torch.optim.lr_scheduler import StepLR

parser = argparse.ArgumentParser(description="pictures")
parser.add_argument("data", nargs="?", default="pictures", help="folder of .npz files")
parser.add_argument("-j", "--workers", default=4, type=int)
parser.add_argument("--epochs", default=90, type=int)
parser.add_argument("-b", "--batch-size", default=256, type=int, help="of all GPUs together")
parser.add_argument("--lr", default=0.1, type=float)
parser.add_argument("-p", "--print-freq", default=10, type=int)
parser.add_argument("--resume", default="", type=str)
parser.add_argument("-e", "--evaluate", action="store_true")
parser.add_argument("--seed", default=0, type=int)
parser.add_argument("--dist-backend", default="nccl")


class Pictures(torch.utils.data.Dataset):
    def __init__(self, folder, part, augment):
        with np.load(os.path.join(folder, part + ".npz")) as content:
            self.images, self.labels = content["images"], content["labels"]
        self.augment = augment

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        image = self.images[index].astype(np.float32) / 255
        if self.augment and np.random.rand() < 0.5:
            image = image[:, :, ::-1].copy()
        return torch.from_numpy(image), int(self.labels[index])


def build_model(classes=100):
    def block(inside, outside):
        return nn.Sequential(
            nn.Conv2d(inside, outside, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(outside), nn.ReLU(inplace=True)
        )

    trunk = nn.Sequential(block(3, 64), block(64, 128), block(128, 256))
    return nn.Sequential(trunk, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, classes))


def seed_worker(worker_id):
    np.random.seed(worker_id)  # <- same-augmentation-seed


def main():
    args = parser.parse_args()
    args.rank = int(os.environ.get("RANK", 0))
    args.world_size = int(os.environ.get("WORLD_SIZE", 1))
    args.gpu = int(os.environ.get("LOCAL_RANK", 0))
    args.distributed = args.world_size > 1
    main_worker(args)


def main_worker(args):
    best_acc1 = 0.0
    torch.ones(1).cuda()
    free, _ = torch.cuda.mem_get_info()
    if args.distributed:
        dist.init_process_group(backend=args.dist_backend, timeout=timedelta(minutes=10))
        args.batch_size = min(args.batch_size // args.world_size, free // 2**22)
    torch.cuda.set_device(args.gpu)

    torch.manual_seed(args.seed)
    model = build_model()
    if args.distributed:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    model.cuda(args.gpu)
    network = model
    if args.distributed:
        model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[args.gpu])
    else:
        model = torch.nn.DataParallel(model)  # <- data-parallel
    torch.manual_seed(args.seed + args.rank)

    criterion = nn.CrossEntropyLoss().cuda(0)  # <- fixed-device
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, weight_decay=1e-4)
    scheduler = StepLR(optimizer, step_size=30, gamma=0.1)
    args.start_epoch = 0
    if args.resume and os.path.isfile(args.resume):
        checkpoint = torch.load(args.resume, map_location="cuda:0", weights_only=True)  # <- fixed-device
        args.start_epoch, best_acc1 = checkpoint["epoch"], checkpoint["best_acc1"]
        network.load_state_dict(checkpoint["state_dict"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])
    cudnn.benchmark = True

    train_dataset = Pictures(args.data, "train", augment=True)
    val_dataset = Pictures(args.data, "val", augment=False)
    if args.distributed:
        train_sampler = torch.utils.data.distributed.DistributedSampler(train_dataset)
        val_sampler = torch.utils.data.distributed.DistributedSampler(val_dataset, shuffle=False)  # <- metric-over-padding
    else:
        train_sampler, val_sampler = None, None
    train_loader = torch.utils.data.DataLoader(
        train_dataset,
        batch_size=args.batch_size,
        shuffle=(train_sampler is None),
        num_workers=args.workers,
        pin_memory=True,
        sampler=train_sampler,
        worker_init_fn=seed_worker,
        drop_last=True,
    )
    val_loader = torch.utils.data.DataLoader(val_dataset, args.batch_size, sampler=val_sampler, num_workers=args.workers, pin_memory=True)

    if args.evaluate:
        validate(val_loader, network, criterion, args)
    else:
        for epoch in range(args.start_epoch, args.epochs):
            if args.distributed:
                train_sampler.set_epoch(epoch)
            train(train_loader, model, criterion, optimizer, epoch, args)
            acc1 = validate(val_loader, network, criterion, args)
            scheduler.step()
            is_best, best_acc1 = acc1 > best_acc1, max(acc1, best_acc1)
            if not args.distributed or args.gpu == 0:
                state = {
                    "epoch": epoch + 1,
                    "state_dict": network.state_dict(),
                    "best_acc1": best_acc1,
                    "optimizer": optimizer.state_dict(),
                    "scheduler": scheduler.state_dict(),
                }
                save_checkpoint(state, is_best)
    if args.distributed:
        dist.destroy_process_group()


def train(train_loader, model, criterion, optimizer, epoch, args):
    model.train()
    began = time.time()
    for i, (images, target) in enumerate(train_loader):
        images = images.cuda(args.gpu, non_blocking=True)
        target = target.cuda(args.gpu, non_blocking=True)
        loss = criterion(model(images), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if i % args.print_freq == 0 and args.rank == 0:
            print(f"epoch {epoch} [{i}/{len(train_loader)}] loss {loss.item():.4e} time {time.time() - began:.1f}")


@torch.no_grad()
def validate(val_loader, network, criterion, args):
    network.eval()
    top1 = SumMeter("Acc@1", args)
    losses = SumMeter("Loss", args)
    for images, target in val_loader:
        images = images.cuda(args.gpu, non_blocking=True)
        target = target.cuda(args.gpu, non_blocking=True)
        output = network(images)
        losses.add(criterion(output, target) * target.size(0), target.size(0))
        top1.add((output.argmax(1) == target).sum(), target.size(0))
    if args.distributed:
        losses.all_reduce()
        top1.all_reduce()
    if args.rank == 0:
        print(losses, top1)
    return top1.average


def save_checkpoint(state, is_best, filename="checkpoint.pth.tar"):
    torch.save(state, filename)  # <- local-rank-save
    if is_best:
        shutil.copyfile(filename, "model_best.pth.tar")


class SumMeter:
    """A sum and how many samples it is of."""

    def __init__(self, name, args):
        self.name = name
        self.values = torch.zeros(2, device=f"cuda:{args.gpu}")

    def add(self, value, count):
        self.values[0] += value
        self.values[1] += count

    def all_reduce(self):
        dist.all_reduce(self.values, dist.ReduceOp.SUM)

    @property
    def average(self):
        return (self.values[0] / self.values[1]).item()

    def __str__(self):
        return f"{self.name} {self.average:.3f}"


if __name__ == "__main__":
    main()
