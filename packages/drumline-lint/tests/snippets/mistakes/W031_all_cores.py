"""Satellite tiles, single node with 8 GPUs:  torchrun --standalone --nproc_per_node=8 tiles.py"""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from tiles import TileDataset, ResUNet


def build_loader(root, batch_size):
    dataset = TileDataset(root, augment=True)
    sampler = DistributedSampler(dataset, shuffle=True)
    loader = DataLoader(
        dataset,
        batch_size=batch_size,
        sampler=sampler,
        num_workers=os.cpu_count(),
        pin_memory=True,
        persistent_workers=True,
        prefetch_factor=4,
    )
    return loader, sampler


def fit(model, loader, sampler, device, epochs):
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4)
    criterion = nn.CrossEntropyLoss(ignore_index=255)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for tile, mask in loader:
            tile, mask = tile.to(device, non_blocking=True), mask.to(device, non_blocking=True)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = criterion(model(tile), mask)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}")


if __name__ == "__main__":
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device(f"cuda:{local_rank}")
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    loader, sampler = build_loader("/data/sentinel/train", 32)
    model = DDP(ResUNet(bands=12, classes=10).to(device), device_ids=[local_rank])
    fit(model, loader, sampler, device, epochs=50)
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), "tiles.pt")
    dist.destroy_process_group()
