import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from graphs import CachedPoints, PointNet

parser = argparse.ArgumentParser()
parser.add_argument("--root", default="/shared/modelnet40")
parser.add_argument("--epochs", type=int, default=120)
args = parser.parse_args()

local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
dist.init_process_group("nccl")
rank = dist.get_rank()

# CachedPoints samples the meshes once (about a minute) and keeps the points under root/cache
if rank != 0:
    dist.barrier()
points = CachedPoints(args.root, split="train", num_points=2048)
if rank == 0:
    dist.barrier()

sampler = DistributedSampler(points)
loader = DataLoader(points, batch_size=24, sampler=sampler, num_workers=4)
net = nn.SyncBatchNorm.convert_sync_batchnorm(PointNet(classes=40)).cuda()
net = DDP(net, device_ids=[local_rank])
opt = torch.optim.Adam(net.parameters(), lr=1e-3)
loss_fn = nn.CrossEntropyLoss(label_smoothing=0.2)

for epoch in range(args.epochs):
    sampler.set_epoch(epoch)
    net.train()
    for cloud, label in loader:
        opt.zero_grad()
        loss = loss_fn(net(cloud.cuda()), label.cuda())
        loss.backward()
        opt.step()
    if rank == 0:
        print(f"epoch {epoch:3d}  loss {loss.item():.4f}")

if rank == 0:
    torch.save(net.module.state_dict(), "pointnet.pt")
dist.destroy_process_group()
