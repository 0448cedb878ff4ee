import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import torchvision
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchvision import transforms as T


class TwoViews:
    def __init__(self, size=96):
        self.tf = T.Compose([
            T.RandomResizedCrop(size, scale=(0.2, 1.0)),
            T.RandomHorizontalFlip(),
            T.RandomApply([T.ColorJitter(0.4, 0.4, 0.4, 0.1)], p=0.8),
            T.RandomGrayscale(0.2),
            T.ToTensor(),
        ])

    def __call__(self, image):
        return self.tf(image), self.tf(image)


class SimCLR(nn.Module):
    def __init__(self, dim=128):
        super().__init__()
        self.backbone = torchvision.models.resnet18(weights=None)
        width = self.backbone.fc.in_features
        self.backbone.fc = nn.Identity()
        self.projector = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, dim))

    def forward(self, x):
        return F.normalize(self.projector(self.backbone(x)), dim=1)


def nt_xent(z, temperature=0.5):
    n = z.size(0) // 2
    sim = z @ z.t() / temperature
    sim.fill_diagonal_(float("-inf"))
    target = torch.arange(2 * n, device=z.device).roll(n)
    return F.cross_entropy(sim, target)


def main():
    dist.init_process_group("nccl")
    rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)

    data = torchvision.datasets.STL10("/data/stl10", split="unlabeled", transform=TwoViews())
    sampler = DistributedSampler(data, shuffle=True, drop_last=True)
    loader = DataLoader(data, 256, sampler=sampler, num_workers=8, drop_last=True, pin_memory=True)

    model = nn.SyncBatchNorm.convert_sync_batchnorm(SimCLR()).to(device)
    model = DDP(model, device_ids=[local_rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200 * len(loader))

    for epoch in range(200):
        sampler.set_epoch(epoch)
        model.train()
        for (first, second), _ in loader:
            views = torch.cat([first, second]).to(device, non_blocking=True)
            z = model.module(views)
            loss = nt_xent(z)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}", flush=True)
            torch.save(model.module.backbone.state_dict(), "simclr_r18.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
