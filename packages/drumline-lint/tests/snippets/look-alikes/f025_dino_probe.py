import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchvision import transforms as T
from torchvision.datasets import INaturalist

ROOT = "/data/inat21"


class LinearProbe(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.encoder = torch.hub.load("facebookresearch/dinov2", "dinov2_vitb14")
        self.encoder.requires_grad_(False)
        self.norm = nn.BatchNorm1d(768, affine=False)
        self.head = nn.Linear(768, classes)

    def train(self, mode=True):
        super().train(mode)
        self.encoder.eval()
        return self

    def forward(self, x):
        with torch.no_grad():
            feats = self.encoder(x)
        return self.head(self.norm(feats))


def main():
    dist.init_process_group("nccl")
    rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)

    norm = T.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
    train = INaturalist(ROOT, "2021_train_mini",
                        transform=T.Compose([T.RandomResizedCrop(224), T.RandomHorizontalFlip(), T.ToTensor(), norm]))
    val = INaturalist(ROOT, "2021_valid",
                      transform=T.Compose([T.Resize(256), T.CenterCrop(224), T.ToTensor(), norm]))
    sampler = DistributedSampler(train, shuffle=True)
    train_loader = DataLoader(train, 256, sampler=sampler, num_workers=10, pin_memory=True, drop_last=True)
    val_loader = DataLoader(val, 256, sampler=DistributedSampler(val, shuffle=False), num_workers=6)

    if rank == 0:  # fill the hub cache once
        torch.hub.load("facebookresearch/dinov2", "dinov2_vitb14")
    dist.barrier()
    probe = nn.SyncBatchNorm.convert_sync_batchnorm(LinearProbe(10000)).to(device)
    model = DDP(probe, device_ids=[local_rank])
    optimizer = torch.optim.SGD(probe.head.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)

    for epoch in range(10):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in train_loader:
            loss = F.cross_entropy(model(x.to(device, non_blocking=True)), y.to(device, non_blocking=True))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        scheduler.step()

        model.eval()
        stats = torch.zeros(2, device=device)
        with torch.no_grad():
            for x, y in val_loader:
                stats[0] += (model(x.to(device)).argmax(1) == y.to(device)).sum()
                stats[1] += y.numel()
        dist.all_reduce(stats)
        if rank == 0:
            print(f"epoch {epoch} top-1 {(stats[0] / stats[1]).item():.4f}", flush=True)
            torch.save(probe.head.state_dict(), "probe.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
