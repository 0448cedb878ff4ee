import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


def split(name):
    d = torch.load(f"battery_{name}.pt", map_location="cpu", weights_only=True)
    return TensorDataset(d["curve"], d["life"])


@torch.no_grad()
def validate(net, loader, device):
    net.eval()
    s = torch.zeros(2, device=device)
    for x, y in loader:
        s[0] += nn.functional.mse_loss(net(x.to(device)).squeeze(-1), y.to(device), reduction="sum")
        s[1] += y.numel()
    dist.all_reduce(s)
    return (s[0] / s[1]).item()


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(12 + rank)
    train, val = split("train"), split("val")
    sampler = DistributedSampler(train, seed=12, drop_last=True)
    loader = DataLoader(train, 64, sampler=sampler, drop_last=True)
    val_loader = DataLoader(Subset(val, range(rank, len(val), world)), 256)
    net = nn.Sequential(nn.Linear(1000, 256), nn.ReLU(), nn.Linear(256, 1)).to(device)
    model = DDP(net, device_ids=[local_rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    scheduler = ReduceLROnPlateau(optimizer, factor=0.5, patience=5)
    for epoch in range(150):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x.to(device)).squeeze(-1), y.to(device))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        val_loss = validate(model.module, val_loader, device)
        scheduler.step(val_loss)
        if rank == 0:
            print(epoch, f"{val_loss:.5f}", scheduler.get_last_lr()[0])
    if rank == 0:
        torch.save(model.module.state_dict(), "battery.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
