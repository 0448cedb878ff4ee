import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def tabular(name):
    blob = torch.load(f"{name}.pt", map_location="cpu", weights_only=True)
    return TensorDataset(blob["x"], blob["y"])


@torch.no_grad()
def accuracy(model, loader, device):
    model.eval()
    counts = torch.zeros(2, dtype=torch.float64, device=device)
    for x, y in loader:
        out = model(x.to(device)).argmax(1)
        counts[0] += (out == y.to(device)).sum()
        counts[1] += y.numel()
    dist.reduce(counts, dst=0, op=dist.ReduceOp.SUM)
    return (counts[0] / counts[1]).item()


def main(patience=3, epochs=100):
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    torch.manual_seed(6 + rank)

    train, valid = tabular("train"), tabular("valid")
    sampler = DistributedSampler(train, drop_last=True)
    loader = DataLoader(train, 1024, sampler=sampler, drop_last=True)
    valid_loader = DataLoader(valid, 4096, sampler=DistributedSampler(valid, shuffle=False))
    net = nn.Sequential(nn.Linear(54, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 7))
    net = DDP(net.to(device), device_ids=[local_rank])
    opt = torch.optim.Adam(net.parameters())

    best, bad = 0.0, 0
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        net.train()
        for x, y in loader:
            loss = nn.functional.cross_entropy(net(x.to(device)), y.to(device))
            opt.zero_grad()
            loss.backward()
            opt.step()
        acc = accuracy(net, valid_loader, device)
        if acc > best:
            best, bad = acc, 0
            if rank == 0:
                torch.save(net.module.state_dict(), "covtype_best.pt")
        else:
            bad += 1
        if bad >= patience:
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
