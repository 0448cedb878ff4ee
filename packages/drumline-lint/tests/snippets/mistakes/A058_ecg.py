import multiprocessing as mp
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class ECGNet(nn.Module):
    def __init__(self, classes=5):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv1d(12, 64, 15, stride=4), nn.ReLU(), nn.Conv1d(64, 128, 9, stride=4), nn.ReLU())
        self.fc = nn.Linear(128, classes)

    def forward(self, x):
        return self.fc(self.conv(x).mean(-1))


def sanity_check():
    out = ECGNet().cuda()(torch.randn(2, 12, 5000, device="cuda"))
    assert out.shape == (2, 5), out.shape


def worker(rank, world_size, path):
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29577")
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=world_size)
    device = torch.device("cuda", rank)
    torch.manual_seed(rank)
    d = torch.load(path, map_location="cpu", weights_only=True)
    ds = TensorDataset(d["ecg"], d["rhythm"])
    sampler = DistributedSampler(ds, drop_last=True)
    loader = DataLoader(ds, 128, sampler=sampler, drop_last=True)
    model = DDP(ECGNet().to(device), device_ids=[rank])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(30):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    if rank == 0:
        torch.save(model.module.state_dict(), "ecg.pt")
    dist.destroy_process_group()


def main():
    sanity_check()
    world_size = torch.cuda.device_count()
    procs = []
    for rank in range(world_size):
        p = mp.Process(target=worker, args=(rank, world_size, "ptbxl.pt"))
        p.start()
        procs.append(p)
    for p in procs:
        p.join()


if __name__ == "__main__":
    main()
