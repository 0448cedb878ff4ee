import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def build_groups(world_size, n_groups=2):
    size = world_size // n_groups
    out = []
    for g in range(n_groups):
        ranks = list(range(g * size, (g + 1) * size))
        out.append((ranks, dist.new_group(ranks)))
    return out


def broadcast_parameters(model, group):
    for p in model.parameters():
        dist.broadcast(p.data, src=0, group=group)


def average_gradients(model, group):
    n = dist.get_world_size(group)
    for p in model.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad, group=group)
            p.grad /= n


def main():
    """Two populations with different learning rates, each data-parallel within its own group."""
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    rank = dist.get_rank()
    torch.manual_seed(rank)

    groups = build_groups(dist.get_world_size())
    index, (ranks, group) = next((i, g) for i, g in enumerate(groups) if rank in g[0])
    model = nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 10)).to(device)
    broadcast_parameters(model, group)
    optimizer = torch.optim.SGD(model.parameters(), lr=[0.1, 0.01][index], momentum=0.9)

    d = torch.load("digits.pt", map_location="cpu", weights_only=True)
    ds = TensorDataset(d["x"], d["y"])
    sampler = DistributedSampler(ds, num_replicas=len(ranks), rank=ranks.index(rank), drop_last=True)
    loader = DataLoader(ds, 128, sampler=sampler, drop_last=True)
    for epoch in range(20):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
            optimizer.zero_grad()
            loss.backward()
            average_gradients(model, group)
            optimizer.step()
    if rank == ranks[0]:
        torch.save(model.state_dict(), f"population{index}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
