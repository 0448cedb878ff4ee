import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


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


def series(split):
    d = torch.load(f"/data/scada/{split}.pt", map_location="cpu")
    return TensorDataset(d["window"].float(), d["power"].float())


@torch.no_grad()
def val_loss(net, loader):
    net.eval()
    tot, n = 0.0, 0
    for x, y in loader:
        tot += nn.functional.mse_loss(net(x.cuda()), y.cuda(), reduction="sum").item()
        n += y.numel()
    return tot / n


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    train, val = series("train"), series("val")
    sampler = DistributedSampler(train, drop_last=True)
    train_dl = DataLoader(train, 512, sampler=sampler, drop_last=True, num_workers=2)
    val_dl = DataLoader(Subset(val, range(rank, len(val), world)), 1024)
    net = nn.Sequential(nn.Flatten(), nn.Linear(144 * 8, 256), nn.ReLU(), nn.Linear(256, 6))
    net = DDP(net.cuda(), device_ids=[local_rank])
    opt = torch.optim.Adam(net.parameters(), lr=1e-3)
    stopper = EarlyStopping()
    for epoch in range(200):
        sampler.set_epoch(epoch)
        net.train()
        for x, y in train_dl:
            loss = nn.functional.mse_loss(net(x.cuda()), y.cuda())
            opt.zero_grad()
            loss.backward()
            opt.step()
        if stopper.step(val_loss(net.module, val_dl)):
            break
    if rank == 0:
        torch.save(net.module.state_dict(), "turbine.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
