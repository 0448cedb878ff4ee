"""Pose estimation; srun starts one process per GPU and the job script exports RANK, LOCAL_RANK, WORLD_SIZE, MASTER_*."""
import argparse
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from pose import HeatmapNet, Keypoints, heatmap_loss


def train_epoch(model, loader, opt, device):
    stats = torch.zeros(2, device=device)
    model.train()
    for image, target in loader:
        loss = heatmap_loss(model(image.to(device, non_blocking=True)), target.to(device, non_blocking=True))
        opt.zero_grad()
        loss.backward()
        opt.step()
        stats[0] += loss.detach() * len(image)
        stats[1] += len(image)
    dist.reduce(stats, dst=0)
    return stats


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=140)
    ap.add_argument("--per-gpu", type=int, default=32)
    args = ap.parse_args()

    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    data = Keypoints("/datasets/coco", "train2017")
    sampler = DistributedSampler(data)
    loader = DataLoader(data, args.per_gpu, sampler=sampler, num_workers=6, pin_memory=True)
    model = DDP(HeatmapNet(joints=17).to(device), device_ids=[device.index])
    opt = torch.optim.AdamW(model.parameters(), lr=5e-4)
    sched = torch.optim.lr_scheduler.MultiStepLR(opt, [90, 120], gamma=0.1)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        stats = train_epoch(model, loader, opt, device)
        sched.step()
        if dist.get_rank() == 0:
            total, count = stats.tolist()
            print(f"epoch {epoch} loss {total / count:.5f}", flush=True)
            torch.save(model.module.state_dict(), "pose.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
