import os

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def defects():
    d = torch.load("/data/severstal/patches.pt", map_location="cpu")
    return TensorDataset(d["patch"], d["defect"])


class PatchNet(nn.Sequential):
    def __init__(self, classes=5):
        super().__init__(
            nn.Conv2d(1, 32, 5, 2), nn.ReLU(), nn.Conv2d(32, 64, 5, 2), nn.ReLU(),
            nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(64 * 16, classes))


def main():
    dist.init_process_group("nccl")
    rank = int(os.environ["RANK"])
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    ds = defects()
    sampler = DistributedSampler(ds, drop_last=True)
    loader = DataLoader(ds, batch_size=512, sampler=sampler, num_workers=4,
                        pin_memory=True, drop_last=True)
    model = PatchNet().to(device)
    model = DDP(model)
    opt = optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    weights = torch.tensor([0.2, 1.0, 1.0, 0.7, 1.0], device=device)
    ce = nn.CrossEntropyLoss(weight=weights)
    for epoch in range(30):
        sampler.set_epoch(epoch)
        for patch, defect in loader:
            patch, defect = patch.to(device, non_blocking=True), defect.to(device, non_blocking=True)
            loss = ce(model(patch), defect)
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0:
            torch.save(model.module.state_dict(), "steel.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
