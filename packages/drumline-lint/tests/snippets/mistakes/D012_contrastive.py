"""Contrastive pretraining on aerial images with a model that owns its loss."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from aerial.augment import TwoViews
from aerial.data import Scenes
from aerial.resnet import resnet34_trunk


class SimCLR(nn.Module):
    def __init__(self, dim=128, temperature=0.2):
        super().__init__()
        self.trunk = resnet34_trunk()
        self.proj = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, dim))
        self.temperature = temperature

    def forward(self, x):
        return F.normalize(self.proj(self.trunk(x)), dim=-1)

    def training_loss(self, a, b):
        z = torch.cat([self(a), self(b)])
        sim = z @ z.T / self.temperature
        sim.fill_diagonal_(float("-inf"))
        n = len(a)
        target = torch.cat([torch.arange(n, 2 * n), torch.arange(n)]).to(z.device)
        return F.cross_entropy(sim, target)


def bare(model):
    """The network itself, with or without a wrapper round it."""
    return model.module if hasattr(model, "module") else model


def main():
    dist.init_process_group("nccl")
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    device = torch.device("cuda", local)
    torch.manual_seed(100 + dist.get_rank())

    scenes = Scenes("/data/scenes", transform=TwoViews(size=224))
    sampler = DistributedSampler(scenes, shuffle=True, seed=0)
    loader = DataLoader(scenes, batch_size=192, sampler=sampler, num_workers=10, drop_last=True, pin_memory=True)

    model = DDP(SimCLR().to(device), device_ids=[local])
    opt = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9, weight_decay=1e-4)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 200 * len(loader))

    for epoch in range(200):
        sampler.set_epoch(epoch)
        model.train()
        for a, b in loader:
            net = bare(model)
            loss = net.training_loss(a.to(device, non_blocking=True), b.to(device, non_blocking=True))
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            sched.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {loss.item():.3f}", flush=True)
            torch.save(bare(model).trunk.state_dict(), "trunk.pt")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
