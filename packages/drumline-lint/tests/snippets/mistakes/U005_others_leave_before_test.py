import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from gnn.data import load_split
from gnn.nets import GraphRegressor


def evaluate(model, loader, device):
    model.eval()
    acc = torch.zeros(2, device=device, dtype=torch.float64)
    with torch.no_grad():
        for g, target in loader:
            pred = model.module(g.to(device))
            acc[0] += F.l1_loss(pred, target.to(device), reduction="sum")
            acc[1] += target.numel()
    dist.all_reduce(acc)
    return (acc[0] / acc[1]).item()


def main():
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)

    train_set, test_set = load_split("train"), load_split("test")
    sampler = DistributedSampler(train_set, shuffle=True)
    test_sampler = DistributedSampler(test_set, shuffle=False)
    train_loader = DataLoader(train_set, 128, sampler=sampler, num_workers=4)
    test_loader = DataLoader(test_set, 256, sampler=test_sampler, num_workers=4)

    model = DDP(GraphRegressor(hidden=256).to(device), device_ids=[device.index])
    opt = torch.optim.Adam(model.parameters(), lr=3e-4)

    for epoch in range(100):
        sampler.set_epoch(epoch)
        model.train()
        for g, target in train_loader:
            loss = F.l1_loss(model(g.to(device)), target.to(device))
            opt.zero_grad()
            loss.backward()
            opt.step()

    if rank != 0:
        dist.destroy_process_group()
        sys.exit(0)

    mae = evaluate(model, test_loader, device)
    print(f"test MAE {mae:.5f}")
    torch.save(model.module.state_dict(), "final.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
