import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

from engine import train_one_epoch, validate


class PointNet(nn.Module):
    def __init__(self, classes=40):
        super().__init__()
        self.point = nn.Sequential(nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1024))
        self.head = nn.Sequential(nn.Linear(1024, 256), nn.ReLU(), nn.Linear(256, classes))

    def forward(self, x):
        return self.head(self.point(x).amax(1))


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group(backend="nccl")
    rank, world, device = dist.get_rank(), dist.get_world_size(), torch.device("cuda", local_rank)
    torch.manual_seed(rank)
    blob = torch.load("data/modelnet40.pt", map_location="cpu", weights_only=True)
    train, test = (TensorDataset(blob[f"{s}_x"], blob[f"{s}_y"]) for s in ("train", "test"))
    sampler = DistributedSampler(train)
    loader = DataLoader(train, 32, sampler=sampler, drop_last=True)
    test_loader = DataLoader(Subset(test, range(rank, len(test), world)), 64)
    net = PointNet().to(device)
    model = DDP(net, device_ids=[local_rank])
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(150):
        sampler.set_epoch(epoch)
        loss = train_one_epoch(model, loader, opt, device)
        acc = validate(net, test_loader, device)
        if rank == 0:
            print(f"{epoch} loss {loss:.4f} acc {acc:.4f}")
            torch.save(net.state_dict(), "pointnet.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
