"""Local SGD: gradients within a node every step, weights between nodes every 16."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from tabnet.data import Rows
from tabnet.net import Net

EVERY = 16


def make_groups():
    """(group of my node, group of same local rank over nodes)"""
    per = int(os.environ["LOCAL_WORLD_SIZE"])
    rank, world = dist.get_rank(), dist.get_world_size()
    mine_node = mine_cross = None
    for start in range(0, world, per):
        ranks = list(range(start, start + per))
        g = dist.new_group(ranks)
        if rank in ranks:
            mine_node = g
    for local in range(per):
        ranks = list(range(local, world, per))
        g = dist.new_group(ranks)
        if rank in ranks:
            mine_cross = g
    return mine_node, mine_cross


@torch.no_grad()
def average_weights(net, group):
    n = dist.get_world_size(group)
    for p in net.parameters():
        dist.all_reduce(p.data, group=group)
        p.data.div_(n)


def main():
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    node_group, cross_group = make_groups()

    rows = Rows("/data/rows")
    sampler = DistributedSampler(rows, shuffle=True, drop_last=True)
    loader = DataLoader(rows, 2048, sampler=sampler, num_workers=4, drop_last=True)
    torch.manual_seed(0)
    net = Net().cuda()
    for p in net.parameters():
        dist.broadcast(p.data, src=0)
    model = DDP(net, device_ids=[local], process_group=node_group)
    opt = torch.optim.SGD(model.parameters(), lr=0.05)

    step = 0
    for epoch in range(10):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x.cuda()), y.cuda())
            opt.zero_grad()
            loss.backward()
            opt.step()
            step += 1
            if step % EVERY == 0:
                average_weights(model.module, cross_group)
        average_weights(model.module, cross_group)
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}", flush=True)
            torch.save(model.module.state_dict(), "net.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
