# torchrun --nproc_per_node=4 stop_flag.py
import math
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

PATIENCE = 5


def load(name):
    d = torch.load(f"data/{name}.pt", map_location="cpu")
    return TensorDataset(d["x"], d["y"])


@torch.no_grad()
def val_loss(net, loader):
    net.eval()
    s, n = 0.0, 0
    for x, y in loader:
        s += nn.functional.l1_loss(net(x.cuda()), y.cuda(), reduction="sum").item()
        n += y.numel()
    return s / n


def main():
    dist.init_process_group("nccl")
    rank, gpu = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(gpu)
    train = load("train")
    sampler = DistributedSampler(train)
    loader = DataLoader(train, 256, sampler=sampler)
    val_loader = DataLoader(load("val"), 2048) if rank == 0 else None

    net = nn.Sequential(nn.Linear(200, 400), nn.LayerNorm(400), nn.GELU(), nn.Linear(400, 1))
    model = DDP(net.cuda(), device_ids=[gpu])
    opt = torch.optim.Adam(model.parameters(), 5e-4)
    stop = torch.zeros(1, dtype=torch.int32, device="cuda")
    best, bad = math.inf, 0

    for epoch in range(500):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            loss = nn.functional.l1_loss(model(x.cuda()), y.cuda())
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0:
            v = val_loss(model.module, val_loader)
            if v < best:
                best, bad = v, 0
                torch.save(model.module.state_dict(), "best.pt")
            else:
                bad += 1
            stop.fill_(int(bad >= PATIENCE))
        dist.broadcast(stop, src=0)
        if stop.item():
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
