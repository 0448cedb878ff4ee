import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def make_groups(size):
    rank, world = dist.get_rank(), dist.get_world_size()
    assert world % size == 0
    mine = None
    for first in range(0, world, size):
        g = dist.new_group(ranks=list(range(first, first + size)))
        if first <= rank < first + size:
            mine = g
    return mine


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    ensemble = rank // 4
    group = make_groups(4)
    torch.manual_seed(100 + ensemble)
    net = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1))
    net = DDP(net.cuda(), device_ids=[local_rank], process_group=group)
    opt = torch.optim.Adam(net.parameters(), lr=1e-3)
    gen = torch.Generator(device="cuda").manual_seed(rank)
    for step in range(20_000):
        x = torch.rand(4096, 32, device="cuda", generator=gen) * 2 - 1
        y = (x.pow(2).sum(1, keepdim=True) * 3).sin()
        loss = nn.functional.mse_loss(net(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
    if rank % 4 == 0:
        torch.save(net.module.state_dict(), f"member{ensemble}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
