"""Churn model with early stopping, torchrun --standalone --nproc_per_node=4 churn.py"""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from churn import Accounts, TabTransformer


class EarlyStopping:
    def __init__(self, patience):
        self.patience, self.bad, self.best = patience, 0, float("inf")

    def step(self, loss):
        improved = loss < self.best
        self.bad = 0 if improved else self.bad + 1
        self.best = min(self.best, loss)
        return improved, self.bad >= self.patience


@torch.no_grad()
def full_validation(net, loader, device):
    net.eval()
    total, n = 0.0, 0
    for x, y in loader:
        logits = net(x.to(device))
        total += F.binary_cross_entropy_with_logits(logits, y.to(device), reduction="sum").item()
        n += y.numel()
    return total / n


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    device = torch.device("cuda", local_rank)

    train = Accounts("/data/churn/train.parquet")
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=1024, sampler=sampler, num_workers=4)
    model = DDP(TabTransformer(train.columns).to(device), device_ids=[local_rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    stopper = EarlyStopping(patience=8)
    if rank == 0:
        val_loader = DataLoader(Accounts("/data/churn/val.parquet"), batch_size=4096)

    stop = torch.zeros(1, device=device)
    for epoch in range(300):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            loss = F.binary_cross_entropy_with_logits(model(x.to(device)), y.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            improved, enough = stopper.step(full_validation(model.module, val_loader, device))
            stop.fill_(float(enough))
            if improved:
                torch.save(model.module.state_dict(), "churn.pt")
        dist.broadcast(stop, src=0)
        if stop.item():
            break

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
