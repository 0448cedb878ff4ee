import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

from control import StopController


def dataset(path):
    d = torch.load(path, map_location="cpu", weights_only=True)
    return TensorDataset(d["x"], d["y"])


@torch.no_grad()
def loss_on(net, loader, device):
    net.eval()
    acc = torch.zeros(2, device=device)
    for x, y in loader:
        acc[0] += nn.functional.cross_entropy(net(x.to(device)), y.to(device), reduction="sum")
        acc[1] += y.numel()
    dist.all_reduce(acc)
    return (acc[0] / acc[1]).item()


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(77 + rank)
    train, val = dataset("train.pt"), dataset("val.pt")
    sampler = DistributedSampler(train, seed=77, drop_last=True)
    loader = DataLoader(train, 256, sampler=sampler, drop_last=True)
    val_loader = DataLoader(Subset(val, range(rank, len(val), world)), 512)
    net = nn.Sequential(nn.Linear(90, 256), nn.ReLU(), nn.Linear(256, 6)).to(device)
    model = DDP(net, device_ids=[local_rank])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    stop = StopController(patience=5, device=device)
    for epoch in range(200):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        if stop.update(loss_on(model.module, val_loader, device)):
            break
    if rank == 0:
        torch.save(model.module.state_dict(), "activity.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
