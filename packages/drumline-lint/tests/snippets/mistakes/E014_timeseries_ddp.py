import argparse
import os

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset


class LoadSeries(Dataset):
    """Sliding windows over hourly electricity load."""

    def __init__(self, path, context=336, horizon=96):
        raw = np.load(path).astype("float32")
        mu, sd = raw.mean(0, keepdims=True), raw.std(0, keepdims=True) + 1e-6
        self.x = torch.from_numpy((raw - mu) / sd)
        self.context, self.horizon = context, horizon

    def __len__(self):
        return self.x.size(0) - self.context - self.horizon

    def __getitem__(self, i):
        mid = i + self.context
        return self.x[i:mid], self.x[mid:mid + self.horizon]


class Forecaster(nn.Module):
    def __init__(self, n_series, horizon=96, width=256):
        super().__init__()
        self.horizon = horizon
        self.rnn = nn.GRU(n_series, width, num_layers=2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(width, n_series * horizon)

    def forward(self, x):
        h, _ = self.rnn(x)
        return self.head(h[:, -1]).view(x.size(0), self.horizon, -1)


def run(args):
    dist.init_process_group(backend="nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)

    ds = LoadSeries(args.npy)
    loader = DataLoader(ds, batch_size=args.batch_size, shuffle=True,
                        num_workers=4, pin_memory=True, drop_last=True)

    model = Forecaster(ds.x.size(1)).to(device)
    model = DDP(model, device_ids=[local_rank])
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr)

    for epoch in range(args.epochs):
        total, n = 0.0, 0
        for past, future in loader:
            past, future = past.to(device), future.to(device)
            loss = nn.functional.l1_loss(model(past), future)
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            total, n = total + loss.item(), n + 1
        t = torch.tensor([total, n], device=device, dtype=torch.float64)
        dist.all_reduce(t)
        if dist.get_rank() == 0:
            print(f"epoch {epoch} mae {(t[0] / t[1]).item():.4f}")
            torch.save(model.module.state_dict(), args.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("npy")
    p.add_argument("--out", default="forecaster.pt")
    p.add_argument("--epochs", type=int, default=10)
    p.add_argument("--batch-size", type=int, default=64)
    p.add_argument("--lr", type=float, default=3e-4)
    run(p.parse_args())
