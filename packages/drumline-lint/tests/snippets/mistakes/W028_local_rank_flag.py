#!/usr/bin/env python3
# usage: torchrun --standalone --nproc_per_node=4 depth.py --data /data/nyu
import argparse

import torch
import torch.distributed as dist
from torch.nn.functional import smooth_l1_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from depthnet import DepthNet, NYUv2

parser = argparse.ArgumentParser(description="monocular depth")
parser.add_argument("--local_rank", type=int, default=0)
parser.add_argument("--data", required=True)
parser.add_argument("--epochs", type=int, default=40)
parser.add_argument("--batch", type=int, default=12, help="images per GPU")
args = parser.parse_args()

torch.cuda.set_device(args.local_rank)
dist.init_process_group(backend="nccl", init_method="env://")
device = torch.device("cuda", args.local_rank)
main_process = dist.get_rank() == 0

dataset = NYUv2(args.data, split="train")
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=args.batch, sampler=sampler, num_workers=6, pin_memory=True)

model = DepthNet(encoder="mobilenet").to(device)
model = DistributedDataParallel(model, device_ids=[args.local_rank])
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4)
scheduler = torch.optim.lr_scheduler.OneCycleLR(
    optimizer, max_lr=2e-4, epochs=args.epochs, steps_per_epoch=len(loader)
)

for epoch in range(args.epochs):
    sampler.set_epoch(epoch)
    model.train()
    for rgb, depth in loader:
        rgb, depth = rgb.to(device, non_blocking=True), depth.to(device, non_blocking=True)
        valid = depth > 0
        loss = smooth_l1_loss(model(rgb)[valid], depth[valid])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
    if main_process:
        print(f"epoch {epoch} {loss.item():.4f}")
        torch.save(model.module.state_dict(), "depth.pt")

dist.destroy_process_group()
