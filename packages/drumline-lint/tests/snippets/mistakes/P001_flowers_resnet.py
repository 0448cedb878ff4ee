"""Fine-tune a ResNet on Oxford Flowers with DDP.

    torchrun --nproc_per_node=4 flowers.py --data /data/flowers
"""
import argparse
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchvision import datasets, models, transforms


def parse_args():
    p = argparse.ArgumentParser()
    p.add_argument("--data", required=True)
    p.add_argument("--epochs", type=int, default=30)
    p.add_argument("--batch-size", type=int, default=64, help="per GPU")
    p.add_argument("--lr", type=float, default=0.05)
    p.add_argument("--workers", type=int, default=6)
    p.add_argument("--out", default="checkpoints/flowers.pt")
    return p.parse_args()


def build_loader(args):
    tf = transforms.Compose([
        transforms.RandomResizedCrop(224),
        transforms.RandomHorizontalFlip(),
        transforms.ToTensor(),
        transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    ])
    dataset = datasets.ImageFolder(os.path.join(args.data, "train"), tf)
    sampler = DistributedSampler(dataset, shuffle=True, drop_last=True)
    return DataLoader(dataset, batch_size=args.batch_size, sampler=sampler,
                      num_workers=args.workers, pin_memory=True, drop_last=True)


def main():
    args = parse_args()
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)
    torch.manual_seed(1234 + rank)

    loader = build_loader(args)
    model = models.resnet34(weights=None, num_classes=102).to(device)
    model = DDP(model, device_ids=[local_rank])
    criterion = nn.CrossEntropyLoss().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs)

    for epoch in range(args.epochs):
        model.train()
        t0 = time.time()
        running = torch.zeros(2, device=device)
        for images, target in loader:
            images = images.to(device, non_blocking=True)
            target = target.to(device, non_blocking=True)
            loss = criterion(model(images), target)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            running[0] += loss.detach() * images.size(0)
            running[1] += images.size(0)
        scheduler.step()

        dist.all_reduce(running)
        if rank == 0:
            mean = (running[0] / running[1]).item()
            print(f"epoch {epoch:03d} loss {mean:.4f} ({time.time() - t0:.1f}s)", flush=True)
            os.makedirs(os.path.dirname(args.out), exist_ok=True)
            torch.save({"epoch": epoch, "model": model.module.state_dict()}, args.out)

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
