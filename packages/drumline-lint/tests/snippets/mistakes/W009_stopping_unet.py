import argparse
import os

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset
from torch.utils.data.distributed import DistributedSampler

from segmentation import Slices, UNet

ap = argparse.ArgumentParser(description="run me with: torchrun --nproc_per_node=4 unet.py")
ap.add_argument("--max-epochs", type=int, default=200)
ap.add_argument("--patience", type=int, default=8)
opts = ap.parse_args()

gpu = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(gpu)
dist.init_process_group(backend="nccl")
rank, world = dist.get_rank(), dist.get_world_size()

train_set = Slices("/data/ct", split="train", augment=True)
val_set = Slices("/data/ct", split="val")
train_sampler = DistributedSampler(train_set)
train_loader = DataLoader(train_set, batch_size=8, sampler=train_sampler, num_workers=4)
val_loader = DataLoader(Subset(val_set, range(rank, len(val_set), world)), batch_size=8, num_workers=2)

net = DDP(UNet(1, 4).cuda(), device_ids=[gpu])
opt = torch.optim.Adam(net.parameters(), lr=1e-3)

best, stale = float("inf"), 0
for epoch in range(opts.max_epochs):
    train_sampler.set_epoch(epoch)
    net.train()
    for scan, mask in train_loader:
        opt.zero_grad()
        F.cross_entropy(net(scan.cuda()), mask.cuda()).backward()
        opt.step()

    net.eval()
    losses = []
    with torch.no_grad():
        for scan, mask in val_loader:
            losses.append(F.cross_entropy(net.module(scan.cuda()), mask.cuda()).item())
    val_loss = sum(losses) / len(losses)
    if val_loss < best:
        best, stale = val_loss, 0
    else:
        stale += 1
    if stale >= opts.patience:
        break

if rank == 0:
    torch.save(net.module.state_dict(), "unet.pt")
dist.destroy_process_group()
