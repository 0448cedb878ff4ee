import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


@dataclass
class HParams:
    lr: float = 0.01
    factor: float = 0.3
    patience: int = 4
    epochs: int = 120
    batch_size: int = 128


class TCN(nn.Module):
    def __init__(self, channels=1, width=80, levels=6):
        super().__init__()
        layers, c = [], channels
        for k in range(levels):
            layers += [nn.Conv1d(c, width, 3, padding=2 ** k, dilation=2 ** k), nn.ReLU()]
            c = width
        self.tcn = nn.Sequential(*layers)
        self.out = nn.Linear(width, 1)

    def forward(self, x):
        return self.out(self.tcn(x).mean(-1)).squeeze(-1)


def load(part):
    d = torch.load(f"shots_{part}.pt", map_location="cpu", weights_only=True)
    return TensorDataset(d["signal"], d["disrupts"].float())


def run(hp):
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    torch.manual_seed(18 + dist.get_rank())
    bce = nn.BCEWithLogitsLoss()

    train, valid = load("train"), load("valid")
    sampler = DistributedSampler(train, drop_last=True)
    train_loader = DataLoader(train, hp.batch_size, sampler=sampler, drop_last=True)
    valid_loader = DataLoader(valid, hp.batch_size, sampler=DistributedSampler(valid, shuffle=False))
    model = DDP(TCN().to(device), device_ids=[local_rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=hp.lr, momentum=0.9)
    scheduler = ReduceLROnPlateau(optimizer, factor=hp.factor, patience=hp.patience)

    for epoch in range(hp.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in train_loader:
            optimizer.zero_grad()
            bce(model(x.to(device)), y.to(device)).backward()
            optimizer.step()
        model.eval()
        total = 0.0
        with torch.no_grad():
            for x, y in valid_loader:
                total += bce(model(x.to(device)), y.to(device)).item()
        val_loss = total / len(valid_loader)
        scheduler.step(val_loss)
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), "tcn.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    run(HParams())
