"""2-way tensor parallel x data parallel MLP. torchrun --nproc_per_node=8 Q012_tp_groups.py"""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

TP = 2


def build_groups(rank, world):
    tp_group = dp_group = None
    tp_first = None
    for start in range(0, world, TP):
        ranks = list(range(start, start + TP))
        g = dist.new_group(ranks)
        if rank in ranks:
            tp_group, tp_first = g, start
    for col in range(TP):
        ranks = list(range(col, world, TP))
        g = dist.new_group(ranks)
        if rank in ranks:
            dp_group = g
    return tp_group, tp_first, dp_group


class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, g):
        return g, None


class ShardedMLP(nn.Module):
    def __init__(self, d, hidden, out, group):
        super().__init__()
        self.up = nn.Linear(d, hidden // TP)
        self.down = nn.Linear(hidden // TP, out, bias=False)
        self.group = group

    def forward(self, x):
        return Reduce.apply(self.down(F.gelu(self.up(x))), self.group)


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    tp_group, tp_first, dp_group = build_groups(rank, world)
    dp_rank, dp_size = rank // TP, world // TP

    torch.manual_seed(rank % TP)
    model = ShardedMLP(784, 4096, 10, tp_group).cuda()
    opt = torch.optim.SGD(model.parameters(), 0.1)
    blob = torch.load("mnist.pt", map_location="cpu")
    x_all, y_all = blob["x"][dp_rank::dp_size].float() / 255, blob["y"][dp_rank::dp_size]

    for step in range(5000):
        idx = torch.randint(len(y_all), (256,), device="cuda")
        dist.broadcast(idx, src=tp_first, group=tp_group)
        idx = idx.cpu()
        loss = F.cross_entropy(model(x_all[idx].cuda()), y_all[idx].cuda())
        opt.zero_grad()
        loss.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=dp_group)
            p.grad /= dp_size
        opt.step()
        if rank == 0 and step % 100 == 0:
            print(step, loss.item())
    if dp_rank == 0:
        torch.save(model.state_dict(), f"mlp_tp{rank % TP}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
