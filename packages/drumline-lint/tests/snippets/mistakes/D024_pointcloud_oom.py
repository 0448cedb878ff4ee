"""LiDAR detector with scans of very different size."""
import logging
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from lidar.data import Scans, ragged_collate
from lidar.voxelnet import VoxelNet

logging.basicConfig(level=logging.INFO)
log = logging.getLogger("lidar")


def train_epoch(model, loader, opt, scaler, device, epoch):
    model.train()
    skipped = 0
    for i, scan in enumerate(loader):
        try:
            points = scan["points"].to(device, non_blocking=True)
            with torch.autocast("cuda", dtype=torch.float16):
                losses = model(points, scan["offsets"].to(device), scan["boxes"].to(device))
                loss = losses["cls"] + 2.0 * losses["reg"]
            opt.zero_grad(set_to_none=True)
            scaler.scale(loss).backward()
        except torch.cuda.OutOfMemoryError:
            skipped += 1
            opt.zero_grad(set_to_none=True)
            torch.cuda.empty_cache()
            continue
        scaler.unscale_(opt)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        scaler.step(opt)
        scaler.update()
        if i % 100 == 0 and dist.get_rank() == 0:
            log.info("epoch %d it %d loss %.3f skipped %d", epoch, i, loss.item(), skipped)


def main():
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    device = torch.device("cuda", local)

    scans = Scans("/data/lidar", split="train")
    sampler = DistributedSampler(scans, shuffle=True, seed=21)
    loader = DataLoader(scans, batch_size=2, sampler=sampler, collate_fn=ragged_collate,
                        num_workers=6, pin_memory=True, drop_last=True)
    model = DDP(VoxelNet(classes=10).to(device), device_ids=[local])
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    scaler = torch.cuda.amp.GradScaler()

    for epoch in range(36):
        sampler.set_epoch(epoch)
        train_epoch(model, loader, opt, scaler, device, epoch)
        if rank == 0:
            torch.save({"model": model.module.state_dict(), "opt": opt.state_dict(),
                        "scaler": scaler.state_dict(), "epoch": epoch}, "voxelnet.pt")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
