import json
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torch import nn

from utils.distributed import mean, setup_from_slurm, teardown


class WeatherNet(nn.Module):
    def __init__(self, variables, width):
        super().__init__()
        self.enc = nn.Conv2d(variables, width, 7, padding=3, padding_mode="circular")
        self.mid = nn.ModuleList(
            nn.Sequential(nn.GroupNorm(8, width), nn.GELU(), nn.Conv2d(width, width, 3, padding=1)) for _ in range(12)
        )
        self.dec = nn.Conv2d(width, variables, 1)

    def forward(self, x):
        h = self.enc(x)
        for m in self.mid:
            h = h + m(h)
        return x + self.dec(h)


def main(path):
    cfg = json.loads(Path(path).read_text())
    rank, world, device = setup_from_slurm()
    torch.manual_seed(cfg["seed"] + rank)
    blob = torch.load(cfg["data"], map_location="cpu", weights_only=True, mmap=True)
    data = TensorDataset(blob["now"], blob["next"])
    sampler = DistributedSampler(data, world, rank)
    loader = DataLoader(data, cfg["batch"], sampler=sampler, num_workers=4, drop_last=True)
    model = DDP(WeatherNet(cfg["variables"], cfg["width"]).to(device), device_ids=[device.index])
    opt = torch.optim.AdamW(model.parameters(), lr=cfg["lr"])
    for epoch in range(cfg["epochs"]):
        sampler.set_epoch(epoch)
        model.train()
        total = 0.0
        for a, b in loader:
            loss = F.mse_loss(model(a.to(device)), b.to(device))
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            total += loss.item()
        value = mean(total / len(loader), device)
        if rank == 0:
            print(epoch, value, flush=True)
            torch.save(model.module.state_dict(), cfg["out"])
    teardown()


if __name__ == "__main__":
    main(sys.argv[1])
