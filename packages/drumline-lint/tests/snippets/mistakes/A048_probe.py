import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

GROUP_SIZE = 4


def make_local_group(rank, world_size):
    first = (rank // GROUP_SIZE) * GROUP_SIZE
    members = list(range(first, min(first + GROUP_SIZE, world_size)))
    return dist.new_group(ranks=members)


class GroupNormed(nn.Module):
    """Centre the activations with the mean over the ranks of one node."""

    def __init__(self, dim, group):
        super().__init__()
        self.lin = nn.Linear(dim, dim)
        self.group = group

    def forward(self, x):
        with torch.no_grad():
            mean = x.mean(0)
            dist.all_reduce(mean, group=self.group)
            mean /= dist.get_world_size(self.group)
        return self.lin(x - mean)


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    group = make_local_group(rank, world_size)

    d = torch.load("embeddings.pt", map_location="cpu", weights_only=True)
    ds = TensorDataset(d["x"], d["y"])
    sampler = DistributedSampler(ds, drop_last=True)
    loader = DataLoader(ds, 256, sampler=sampler, drop_last=True)
    model = nn.Sequential(GroupNormed(768, group), nn.ReLU(), nn.Linear(768, 50))
    model = DDP(model.to(device), device_ids=[local_rank])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(15):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.cross_entropy(model(x.to(device)), y.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    if rank == 0:
        torch.save(model.module.state_dict(), "probe.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
