#!/usr/bin/env python
# sbatch --nodes=4 ... srun torchrun --nnodes=4 --nproc_per_node=8 A035_wide_resnet.py --out /shared/runs/wide
import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchvision
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import transforms


def get_loader(root, batch):
    tf = transforms.Compose([transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip(),
                             transforms.ToTensor()])
    ds = torchvision.datasets.ImageFolder(root, tf)
    sampler = DistributedSampler(ds, shuffle=True, drop_last=True)
    return DataLoader(ds, batch, sampler=sampler, num_workers=10, pin_memory=True, drop_last=True), sampler


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", default="/shared/imagenet/train")
    parser.add_argument("--out", type=Path, default=Path("/shared/runs/wide"))
    parser.add_argument("--epochs", type=int, default=90)
    args = parser.parse_args()

    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    torch.manual_seed(dist.get_rank())
    args.out.mkdir(parents=True, exist_ok=True)

    loader, sampler = get_loader(args.data, 64)
    model = torchvision.models.wide_resnet50_2().to(device)
    model = DDP(torch.nn.SyncBatchNorm.convert_sync_batchnorm(model), device_ids=[local_rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.8, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        schedule.step()
        if local_rank == 0:
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
            torch.save(state, args.out / "checkpoint.pth.tar")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
