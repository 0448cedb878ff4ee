"""ConvNeXt on ImageNet, 4 nodes with 8 GPUs each.

On every node:
    torchrun --nnodes=4 --nproc_per_node=8 --rdzv_backend=c10d \
             --rdzv_id=convnext --rdzv_endpoint=node01:29400 convnext.py
"""
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchvision import datasets, models, transforms


def prepare():
    dist.init_process_group(backend="nccl")
    rank = dist.get_rank()
    torch.cuda.set_device(rank)
    return rank, torch.device("cuda", rank)


def train_loader(folder):
    ops = [transforms.RandomResizedCrop(224), transforms.RandAugment(), transforms.ToTensor()]
    images = datasets.ImageFolder(folder, transforms.Compose(ops))
    sampler = DistributedSampler(images, shuffle=True)
    return DataLoader(images, batch_size=128, sampler=sampler, num_workers=10, pin_memory=True), sampler


def main():
    rank, device = prepare()
    loader, sampler = train_loader("/imagenet/train")
    model = models.convnext_tiny().to(device)
    model = DistributedDataParallel(model, device_ids=[device.index])
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=300)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)

    for epoch in range(300):
        sampler.set_epoch(epoch)
        for images, target in loader:
            images = images.to(device, non_blocking=True)
            target = target.to(device, non_blocking=True)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = criterion(model(images), target)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        schedule.step()
        if rank == 0:
            torch.save(model.module.state_dict(), "/shared/convnext/last.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
