import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from forecast.model import TemporalFusion
from forecast.series import ElectricityWindows


class EarlyStopping:
    def __init__(self, patience=5, min_delta=1e-4):
        self.patience, self.min_delta = patience, min_delta
        self.best, self.bad = float("inf"), 0

    def step(self, value):
        if value < self.best - self.min_delta:
            self.best, self.bad = value, 0
        else:
            self.bad += 1
        return self.bad >= self.patience


@torch.no_grad()
def validate(model, loader, crit):
    model.eval()
    losses = [crit(model(x.cuda()), y.cuda()).item() for x, y in loader]
    return sum(losses) / len(losses)


def worker():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")

    train, val = ElectricityWindows("train"), ElectricityWindows("val")
    train_sampler = DistributedSampler(train)
    val_sampler = DistributedSampler(val, shuffle=False)
    train_dl = DataLoader(train, 256, sampler=train_sampler, num_workers=4)
    val_dl = DataLoader(val, 512, sampler=val_sampler, num_workers=4)

    model = DDP(TemporalFusion().cuda(), device_ids=[local_rank])
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    crit = nn.SmoothL1Loss()
    stopper = EarlyStopping(patience=6)

    for epoch in range(200):
        train_sampler.set_epoch(epoch)
        model.train()
        for x, y in train_dl:
            opt.zero_grad()
            crit(model(x.cuda()), y.cuda()).backward()
            opt.step()
        val_loss = validate(model, val_dl, crit)
        if dist.get_rank() == 0:
            print(f"{epoch}: val {val_loss:.5f}")
        if stopper.step(val_loss):
            break

    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), "tft.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    worker()
