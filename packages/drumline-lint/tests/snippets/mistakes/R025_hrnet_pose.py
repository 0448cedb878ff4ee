import argparse
import logging
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from pose.datasets import CocoKeypoints
from pose.hrnet import HRNet
from pose.losses import JointsHeatmapLoss

log = logging.getLogger("hrnet")


def train_epoch(model, loader, criterion, optimizer, scaler, device, epoch):
    model.train()
    skipped, meter = 0, torch.zeros(2, device=device)
    for i, (images, heatmaps, weights) in enumerate(loader):
        images = images.to(device, non_blocking=True)
        heatmaps = heatmaps.to(device, non_blocking=True)
        weights = weights.to(device, non_blocking=True)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.float16):
            pred = model(images)
        loss = criterion(pred.float(), heatmaps, weights)
        if not torch.isfinite(loss):
            skipped += 1
            continue
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        scaler.step(optimizer)
        scaler.update()
        meter += torch.stack([loss.detach(), torch.ones((), device=device)])
        if i % 100 == 0:
            log.info("epoch %d it %d loss %.5f scale %.0f", epoch, i, loss.item(), scaler.get_scale())
    dist.all_reduce(meter)
    return (meter[0] / meter[1].clamp(min=1)).item(), skipped


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--coco", required=True)
    ap.add_argument("--epochs", type=int, default=210)
    ap.add_argument("--batch-per-gpu", type=int, default=32)
    ap.add_argument("--lr", type=float, default=5e-4)
    ap.add_argument("--out", default="out/hrnet")
    args = ap.parse_args()

    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)
    rank = dist.get_rank()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.ERROR)

    ds = CocoKeypoints(args.coco, "train2017", size=(192, 256))
    sampler = DistributedSampler(ds, shuffle=True)
    loader = DataLoader(ds, args.batch_per_gpu, sampler=sampler, num_workers=8, pin_memory=True, drop_last=True)
    model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(HRNet(width=32, joints=17))
    model = DDP(model.to(device), device_ids=[local_rank])
    criterion = JointsHeatmapLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    sched = torch.optim.lr_scheduler.MultiStepLR(optimizer, [170, 200])
    scaler = torch.amp.GradScaler("cuda")
    if rank == 0:
        os.makedirs(args.out, exist_ok=True)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        loss, skipped = train_epoch(model, loader, criterion, optimizer, scaler, device, epoch)
        sched.step()
        log.info("epoch %d mean loss %.5f (%d skipped on rank 0)", epoch, loss, skipped)
        if rank == 0:
            torch.save(model.module.state_dict(), f"{args.out}/hrnet_{epoch:03d}.pth")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
