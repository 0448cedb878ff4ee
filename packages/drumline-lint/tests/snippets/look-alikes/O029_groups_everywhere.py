import os

import torch
import torch.distributed as dist

from tp.layers import ParallelMLP

TP = 4


def make_groups(world, rank):
    tp_group = dp_group = None
    for start in range(0, world, TP):
        ranks = list(range(start, start + TP))
        g = dist.new_group(ranks)
        if rank in ranks:
            tp_group = g
    for offset in range(TP):
        ranks = list(range(offset, world, TP))
        g = dist.new_group(ranks)
        if rank in ranks:
            dp_group = g
    return tp_group, dp_group


def average_gradients(model, group):
    n = dist.get_world_size(group)
    for p in model.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad, group=group)
            p.grad /= n


def main():
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    tp_group, dp_group = make_groups(world, rank)
    torch.manual_seed(100 + rank % TP)
    model = ParallelMLP(1024, tp_group).cuda()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    gen = torch.Generator().manual_seed(rank // TP)
    for step in range(1000):
        x = torch.randn(32, 1024, generator=gen).cuda()
        loss = model(x).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        average_gradients(model, dp_group)
        opt.step()
        if rank == 0 and step % 100 == 0:
            print(step, loss.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
