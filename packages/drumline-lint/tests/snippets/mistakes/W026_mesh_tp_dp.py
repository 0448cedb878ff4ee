"""2-D parallel MLP-mixer: FSDP2 over "dp", tensor parallel over "tp". torchrun --nproc_per_node=8 mixer.py"""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from sensors import Recordings


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


ap = argparse.ArgumentParser()
ap.add_argument("--tp", type=int, default=4)
ap.add_argument("--width", type=int, default=4096)
args = ap.parse_args()

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
mesh = init_device_mesh("cuda", (dist.get_world_size() // args.tp, args.tp), mesh_dim_names=("dp", "tp"))

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(512, args.width), *[Block(args.width) for _ in range(16)], nn.Linear(args.width, 20)).cuda()
for block in model[1:-1]:
    parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(block, mesh=mesh["dp"])
fully_shard(model, mesh=mesh["dp"])
opt = torch.optim.AdamW(model.parameters(), lr=3e-4, foreach=False)

data = Recordings("/data/sensors/train.h5")
sampler = DistributedSampler(data, num_replicas=dist.get_world_size(), rank=dist.get_rank(), drop_last=True)
loader = DataLoader(data, batch_size=64, sampler=sampler, num_workers=2, drop_last=True)

for epoch in range(20):
    sampler.set_epoch(epoch)
    for x, y in loader:
        loss = F.cross_entropy(model(x.cuda()), y.cuda())
        opt.zero_grad()
        loss.backward()
        opt.step()
    if dist.get_rank() == 0:
        print(f"epoch {epoch} loss {loss.item():.4f}")
dist.destroy_process_group()
