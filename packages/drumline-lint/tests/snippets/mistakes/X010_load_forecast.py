# torchrun --nproc_per_node=4 load_forecast.py
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def loader_for(name, train):
    blob = torch.load(f"/data/grid/{name}.pt", map_location="cpu")
    data = TensorDataset(blob["history"], blob["next_day"])
    sampler = DistributedSampler(data, shuffle=train, drop_last=train)
    return DataLoader(data, batch_size=128, sampler=sampler), sampler


@torch.no_grad()
def validate(model, loader):
    model.eval()
    total, count = 0.0, 0
    for x, y in loader:
        total += nn.functional.mse_loss(model(x.cuda()), y.cuda(), reduction="sum").item()
        count += y.numel()
    model.train()
    return total / count


def main():
    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    train_loader, train_sampler = loader_for("train", True)
    val_loader, _ = loader_for("val", False)
    net = nn.Sequential(nn.Linear(168, 512), nn.SiLU(), nn.Linear(512, 24)).cuda()
    model = DDP(net, device_ids=[local_rank])
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    sched = ReduceLROnPlateau(opt, mode="min", factor=0.3, patience=2)
    for epoch in range(80):
        train_sampler.set_epoch(epoch)
        for x, y in train_loader:
            opt.zero_grad()
            nn.functional.mse_loss(model(x.cuda()), y.cuda()).backward()
            opt.step()
        val_mse = validate(model, val_loader)
        sched.step(val_mse)
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), "forecast.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
