import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


class EarlyStopping:
    def __init__(self, patience=5, min_delta=1e-4):
        self.patience, self.min_delta = patience, min_delta
        self.best = float("inf")
        self.bad = 0

    def step(self, value):
        if value < self.best - self.min_delta:
            self.best, self.bad = value, 0
        else:
            self.bad += 1
        return self.bad >= self.patience


def load(split):
    d = torch.load(f"/data/credit/{split}.pt", map_location="cpu")
    return TensorDataset(d["x"].float(), d["y"].float())


@torch.no_grad()
def validate(net, loader, device):
    net.eval()
    total, n = 0.0, 0
    for x, y in loader:
        out = net(x.to(device)).squeeze(-1)
        total += nn.functional.binary_cross_entropy_with_logits(
            out, y.to(device), reduction="sum").item()
        n += y.numel()
    return total / n


def main():
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)

    train, val = load("train"), load("val")
    sampler = DistributedSampler(train, shuffle=True)
    train_loader = DataLoader(train, 1024, sampler=sampler, drop_last=True)
    val_loader = DataLoader(Subset(val, range(rank, len(val), world)), 4096)

    net = nn.Sequential(nn.Linear(212, 512), nn.ReLU(), nn.Dropout(0.2),
                        nn.Linear(512, 512), nn.ReLU(), nn.Dropout(0.2), nn.Linear(512, 1))
    ddp = DDP(net.to(device), device_ids=[device.index])
    opt = torch.optim.AdamW(ddp.parameters(), 1e-3)
    stopper = EarlyStopping()

    for epoch in range(200):
        sampler.set_epoch(epoch)
        ddp.train()
        for x, y in train_loader:
            out = ddp(x.to(device)).squeeze(-1)
            loss = nn.functional.binary_cross_entropy_with_logits(out, y.to(device))
            opt.zero_grad()
            loss.backward()
            opt.step()

        val_loss = validate(ddp.module, val_loader, device)
        if stopper.step(val_loss):
            print(f"rank {rank}: stopping at epoch {epoch}")
            break

    if rank == 0:
        torch.save(ddp.module.state_dict(), "credit_mlp.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
