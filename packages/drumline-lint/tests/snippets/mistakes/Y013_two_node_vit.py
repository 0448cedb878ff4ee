"""ViT on two machines with 8 GPUs each.

On every machine:
    torchrun --nnodes=2 --nproc_per_node=8 --node_rank=$NODE_RANK \
        --master_addr=10.1.0.11 --master_port=29500 two_node_vit.py
"""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import datasets, models, transforms


def setup():
    rank = int(os.environ["RANK"])
    world_size = int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=world_size)
    return rank, world_size


def get_loader(batch_size):
    tf = transforms.Compose([
        transforms.RandomResizedCrop(224),
        transforms.RandAugment(),
        transforms.RandomHorizontalFlip(),
        transforms.ToTensor(),
    ])
    dataset = datasets.ImageFolder("/nfs/imagenet/train", tf)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=batch_size, sampler=sampler,
                        num_workers=10, pin_memory=True, drop_last=True)
    return loader, sampler


def main():
    rank, world_size = setup()
    loader, sampler = get_loader(batch_size=4096 // world_size)

    model = models.vit_b_16().cuda()
    model = DDP(model, device_ids=[rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=3e-3, total_steps=300 * len(loader), pct_start=0.1)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.11)

    for epoch in range(300):
        sampler.set_epoch(epoch)
        model.train()
        for images, labels in loader:
            images, labels = images.cuda(non_blocking=True), labels.cuda(non_blocking=True)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = criterion(model(images), labels)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.3f}", flush=True)
            torch.save(model.module.state_dict(), f"/nfs/ckpt/vit/{epoch:03d}.pt")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
