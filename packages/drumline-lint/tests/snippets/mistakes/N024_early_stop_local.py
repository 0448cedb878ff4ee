import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from energy.series import LoadForecast
from energy.tft import TemporalFusion


class EarlyStopping:
    def __init__(self, patience=5, delta=1e-4):
        self.patience, self.delta = patience, delta
        self.best, self.bad = float("inf"), 0

    def step(self, value):
        if value < self.best - self.delta:
            self.best, self.bad = value, 0
        else:
            self.bad += 1
        return self.bad >= self.patience


def val_loss(model, loader, device):
    model.eval()
    total, n = 0.0, 0
    with torch.no_grad():
        for x, y in loader:
            total += torch.nn.functional.mse_loss(model(x.to(device)), y.to(device)).item() * len(y)
            n += len(y)
    return total / n


def main():
    dist.init_process_group("nccl")
    rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)
    train_ds, val_ds = LoadForecast("train"), LoadForecast("val")
    ts, vs = DistributedSampler(train_ds), DistributedSampler(val_ds, shuffle=False)
    train_dl = DataLoader(train_ds, 256, sampler=ts, num_workers=2, drop_last=True)
    val_dl = DataLoader(val_ds, 256, sampler=vs, num_workers=2)
    model = DDP(TemporalFusion().to(device), device_ids=[local_rank])
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    stopper = EarlyStopping(patience=8)

    for epoch in range(200):
        ts.set_epoch(epoch)
        model.train()
        for x, y in train_dl:
            loss = torch.nn.functional.mse_loss(model(x.to(device)), y.to(device))
            opt.zero_grad()
            loss.backward()
            opt.step()
        v = val_loss(model, val_dl, device)
        if stopper.step(v):
            print(f"rank {rank}: early stop at epoch {epoch}")
            break
    if rank == 0:
        torch.save(model.module.state_dict(), "tft.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
