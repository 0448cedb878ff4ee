import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tracking import make_tracker


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    rank = dist.get_rank()
    torch.manual_seed(52 + rank)
    tracker = make_tracker("crops", {"lr": 1e-3, "batch": 256})
    d = torch.load("crops.pt", map_location="cpu", weights_only=True)
    ds = TensorDataset(d["x"], d["y"])
    sampler = DistributedSampler(ds, seed=52, drop_last=True)
    loader = DataLoader(ds, 256, sampler=sampler, drop_last=True)
    net = nn.Sequential(nn.Linear(60, 256), nn.ReLU(), nn.Linear(256, 9)).to(device)
    model = DDP(net, device_ids=[local_rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(30):
        sampler.set_epoch(epoch)
        running = torch.zeros((), device=device)
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            running += loss.detach()
        dist.all_reduce(running, op=dist.ReduceOp.AVG)
        tracker.log({"loss": running.item() / len(loader), "epoch": epoch})
    tracker.finish()
    if rank == 0:
        torch.save(model.module.state_dict(), "crops_net.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
