# torchrun --nproc_per_node=2 timeseries_tcn.py
from __future__ import annotations

import logging
import os

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

logging.basicConfig(format="%(asctime)s %(message)s", level=logging.INFO)

RANK = os.environ["RANK"]
LOCAL_RANK = int(os.environ["LOCAL_RANK"])


class Load(Dataset):
    def __init__(self, path: str, hist: int = 336, horizon: int = 24):
        a = np.load(path)
        self.mean, self.std = a.mean(0), a.std(0) + 1e-6
        self.x = torch.from_numpy(((a - self.mean) / self.std).astype(np.float32))
        self.hist, self.horizon = hist, horizon

    def __len__(self) -> int:
        return len(self.x) - self.hist - self.horizon + 1

    def __getitem__(self, i: int):
        return self.x[i:i + self.hist].t(), self.x[i + self.hist:i + self.hist + self.horizon].t()


class TCN(nn.Module):
    def __init__(self, n: int, horizon: int = 24, width: int = 128):
        super().__init__()
        blocks, c = [], n
        for k in range(7):
            d = 2 ** k
            blocks += [nn.ConstantPad1d((2 * d, 0), 0.0), nn.Conv1d(c, width, 3, dilation=d), nn.ReLU()]
            c = width
        self.tcn = nn.Sequential(*blocks)
        self.head = nn.Linear(width, n * horizon)
        self.n, self.horizon = n, horizon

    def forward(self, x):
        return self.head(self.tcn(x)[..., -1]).view(-1, self.n, self.horizon)


def train() -> None:
    dist.init_process_group("nccl")
    torch.cuda.set_device(LOCAL_RANK)
    ds = Load("electricity.npy")
    sampler = DistributedSampler(ds)
    loader = DataLoader(ds, 128, sampler=sampler, num_workers=2)
    model = DDP(TCN(ds.x.shape[1]).cuda(), device_ids=[LOCAL_RANK])
    opt = torch.optim.Adam(model.parameters(), 1e-3)

    for epoch in range(25):
        sampler.set_epoch(epoch)
        tot = torch.zeros(2, device="cuda")
        for x, y in loader:
            loss = nn.functional.l1_loss(model(x.cuda()), y.cuda())
            opt.zero_grad()
            loss.backward()
            opt.step()
            tot[0] += loss.detach()
            tot[1] += 1
        dist.all_reduce(tot)
        if RANK == 0:
            logging.info("epoch %d mae %.4f", epoch, (tot[0] / tot[1]).item())
            torch.save({"model": model.module.state_dict(), "mean": ds.mean, "std": ds.std}, "tcn.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    train()
