import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def build_groups(world_size, n=2):
    size = world_size // n
    groups = []
    for k in range(n):
        ranks = list(range(k * size, (k + 1) * size))
        groups.append((ranks, dist.new_group(ranks)))
    return groups


@torch.no_grad()
def same_start(net, group):
    source = dist.get_global_rank(group, 0)
    for p in net.parameters():
        dist.broadcast(p, src=source, group=group)


def average_gradients(net, group):
    for p in net.parameters():
        dist.all_reduce(p.grad, group=group)
        p.grad /= dist.get_world_size(group)


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    rank, world = dist.get_rank(), dist.get_world_size()
    assert world % 2 == 0, "needs an even number of processes"
    torch.manual_seed(rank)
    groups = build_groups(world)
    which = rank // (world // 2)
    ranks, group = groups[which]
    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8)).to(device)
    same_start(net, group)
    optimizer = torch.optim.SGD(net.parameters(), lr=(0.1, 0.02)[which], momentum=0.9)
    d = torch.load("sensors.pt", map_location="cpu", weights_only=True)
    ds = TensorDataset(d["x"], d["y"])
    sampler = DistributedSampler(ds, num_replicas=len(ranks), rank=ranks.index(rank), seed=which, drop_last=True)
    loader = DataLoader(ds, 128, sampler=sampler, drop_last=True)
    for epoch in range(20):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.cross_entropy(net(x.to(device)), y.to(device))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            average_gradients(net, group)
            optimizer.step()
    if rank == ranks[0]:
        torch.save(net.state_dict(), f"population_{which}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
