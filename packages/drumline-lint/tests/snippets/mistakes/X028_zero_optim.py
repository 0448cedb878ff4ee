"""Point cloud classifier with a sharded optimizer.  torchrun --standalone --nproc_per_node=4 zero_optim.py"""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

DEFAULTS = {"lr": 1e-3, "epochs": 120, "batch": 64, "out": "/ckpt/points"}


class PointNet(nn.Module):
    def __init__(self, classes=40):
        super().__init__()
        self.point = nn.Sequential(nn.Linear(3, 256), nn.ReLU(), nn.Linear(256, 2048), nn.ReLU())
        self.cls = nn.Sequential(nn.Linear(2048, 1024), nn.ReLU(), nn.Linear(1024, classes))

    def forward(self, xyz):
        return self.cls(self.point(xyz).amax(dim=1))


def save(cfg, epoch, model, opt):
    if dist.get_rank() == 0:
        state = {"epoch": epoch, "model": model.module.state_dict(), "opt": opt.state_dict()}
        torch.save(state, os.path.join(cfg["out"], f"{epoch:04d}.pt"))
    dist.barrier()


def main(cfg):
    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    blob = torch.load("/data/modelnet40.pt", map_location="cpu")
    data = TensorDataset(blob["xyz"], blob["label"])
    sampler = DistributedSampler(data)
    loader = DataLoader(data, cfg["batch"], sampler=sampler, drop_last=True)
    model = DDP(PointNet().cuda(), device_ids=[local_rank])
    opt = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, lr=cfg["lr"])
    for epoch in range(cfg["epochs"]):
        sampler.set_epoch(epoch)
        for xyz, label in loader:
            loss = nn.functional.cross_entropy(model(xyz.cuda()), label.cuda())
            opt.zero_grad()
            loss.backward()
            opt.step()
        if epoch % 10 == 9:
            save(cfg, epoch, model, opt)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(DEFAULTS)
