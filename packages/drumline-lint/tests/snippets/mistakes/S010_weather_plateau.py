"""ConvLSTM nowcasting.  `torchrun --nproc_per_node=8 weather_plateau.py`"""
import os
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class RadarFrames(Dataset):
    def __init__(self, folder, n_in=6):
        self.files = sorted(Path(folder).glob("*.npy"))
        self.n_in = n_in

    def __len__(self):
        return len(self.files)

    def __getitem__(self, i):
        seq = np.load(self.files[i]).astype(np.float32) / 70.0
        return torch.from_numpy(seq[: self.n_in]), torch.from_numpy(seq[self.n_in])


class Nowcaster(nn.Module):
    def __init__(self, n_in=6, width=96):
        super().__init__()
        layers, c = [], n_in
        for d in (1, 2, 4, 8, 4, 2, 1):
            layers += [nn.Conv2d(c, width, 3, padding=d, dilation=d), nn.GroupNorm(8, width), nn.SiLU()]
            c = width
        self.body = nn.Sequential(*layers, nn.Conv2d(width, 1, 1))

    def forward(self, x):
        return self.body(x).squeeze(1) + x[:, -1]


def validate(model, loader, device):
    model.eval()
    s = torch.zeros(2, device=device)
    with torch.no_grad():
        for x, y in loader:
            x, y = x.to(device), y.to(device)
            s[0] += nn.functional.mse_loss(model(x), y, reduction="sum") / y[0].numel()
            s[1] += x.shape[0]
    dist.reduce(s, dst=0, op=dist.ReduceOp.SUM)
    return (s[0] / s[1]).item()


def main():
    dist.init_process_group("nccl")
    local = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local)
    torch.cuda.set_device(device)

    train, val = RadarFrames("/data/radar/train"), RadarFrames("/data/radar/val")
    sampler = DistributedSampler(train)
    train_loader = DataLoader(train, 24, sampler=sampler, num_workers=8, drop_last=True)
    val_loader = DataLoader(val, 24, sampler=DistributedSampler(val, shuffle=False), num_workers=8)

    model = DistributedDataParallel(Nowcaster().to(device), device_ids=[local])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    plateau = ReduceLROnPlateau(optimizer, factor=0.5, patience=2)

    for epoch in range(50):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in train_loader:
            x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
            loss = nn.functional.huber_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        mse = validate(model, val_loader, device)
        plateau.step(mse)
        if dist.get_rank() == 0:
            print(f"{epoch:02d} mse={mse:.5f} lr={optimizer.param_groups[0]['lr']:.2e}", flush=True)
            torch.save(model.module.state_dict(), "nowcaster.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
