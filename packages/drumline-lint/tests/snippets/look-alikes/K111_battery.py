import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


def cycles(split):
    d = torch.load(f"/data/battery/{split}.pt", map_location="cpu")
    return TensorDataset(d["curve"].float(), d["soh"].float())


@torch.no_grad()
def val_mse(net, loader):
    net.eval()
    s = torch.zeros(2, device="cuda", dtype=torch.float64)
    for x, y in loader:
        s[0] += (net(x.cuda()).squeeze(1) - y.cuda()).pow(2).sum()
        s[1] += len(y)
    dist.all_reduce(s)
    return (s[0] / s[1]).item()


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    train, val = cycles("train"), cycles("val")
    sampler = DistributedSampler(train, drop_last=True)
    train_dl = DataLoader(train, 256, sampler=sampler, drop_last=True)
    val_dl = DataLoader(Subset(val, range(rank, len(val), world)), 512)
    net = nn.Sequential(nn.Linear(1000, 256), nn.Tanh(), nn.Linear(256, 64), nn.Tanh(), nn.Linear(64, 1))
    net = DDP(net.cuda(), device_ids=[local_rank])
    opt = torch.optim.Adam(net.parameters(), lr=1e-3)
    best, bad, patience = float("inf"), 0, 8
    for epoch in range(500):
        sampler.set_epoch(epoch)
        net.train()
        for x, y in train_dl:
            loss = nn.functional.mse_loss(net(x.cuda()).squeeze(1), y.cuda())
            opt.zero_grad()
            loss.backward()
            opt.step()
        score = val_mse(net.module, val_dl)
        if score < best:
            best, bad = score, 0
            if rank == 0:
                torch.save(net.module.state_dict(), "battery.pt")
        else:
            bad += 1
            if bad >= patience:
                break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
