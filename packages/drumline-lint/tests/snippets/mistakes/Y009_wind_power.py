"""Forecast of wind power from weather grids. torchrun --nproc_per_node=4 wind_power.py"""
import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Windows(Dataset):
    def __init__(self, path, length=96, horizon=24):
        self.series = np.load(path, mmap_mode="r")
        self.length, self.horizon = length, horizon

    def __len__(self):
        return len(self.series) - self.length - self.horizon

    def __getitem__(self, i):
        mid = i + self.length
        past = self.series[i:mid].astype(np.float32)
        power = self.series[mid:mid + self.horizon, 0].astype(np.float32)
        return torch.from_numpy(past), torch.from_numpy(power)


class Forecaster(nn.Module):
    def __init__(self, features=40, hidden=512, horizon=24):
        super().__init__()
        self.rnn = nn.LSTM(features, hidden, num_layers=3, batch_first=True, dropout=0.1)
        self.head = nn.Linear(hidden, horizon)

    def forward(self, x):
        out, _ = self.rnn(x)
        return self.head(out[:, -1])


def main():
    dist.init_process_group("nccl")
    rank = dist.get_rank()

    model = Forecaster().cuda()
    model = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    dataset = Windows("/data/wind/2015_2022.npy")
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=256, sampler=sampler, num_workers=4,
                        pin_memory=True, drop_last=True)

    for epoch in range(15):
        sampler.set_epoch(epoch)
        running = 0.0
        for past, power in loader:
            past, power = past.cuda(non_blocking=True), power.cuda(non_blocking=True)
            loss = nn.functional.l1_loss(model(past), power)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            running += loss.item()
        if rank == 0:
            print(f"epoch {epoch} mae {running / len(loader):.4f}")

    if rank == 0:
        torch.save(model.module.state_dict(), "wind_power.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
