import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class Topology:
    """world = data_parallel x tensor_parallel, tensor parallel ranks are adjacent."""

    def __init__(self, tp_size):
        world, rank = dist.get_world_size(), dist.get_rank()
        assert world % tp_size == 0
        self.tp_size, self.dp_size = tp_size, world // tp_size
        tp_index, dp_index = rank // tp_size, rank % tp_size

        tp_ranks = [tp_index * tp_size + i for i in range(tp_size)]
        self.tp_group = dist.new_group(tp_ranks)

        dp_ranks = [dp_index + i * tp_size for i in range(self.dp_size)]
        self.dp_group = dist.new_group(dp_ranks)
        self.tp_rank = tp_ranks.index(rank)
        self.dp_rank = dp_ranks.index(rank)


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class ParallelMLP(nn.Module):
    def __init__(self, dim, hidden, topo):
        super().__init__()
        assert hidden % topo.tp_size == 0
        local = hidden // topo.tp_size
        self.topo = topo
        self.w1 = nn.Parameter(torch.empty(local, dim))
        self.w2 = nn.Parameter(torch.empty(dim, local))
        gen = torch.Generator().manual_seed(1000 + topo.tp_rank)
        for w in (self.w1, self.w2):
            w.data.copy_(torch.randn(w.shape, generator=gen) / math.sqrt(dim))

    def forward(self, x):
        x = _Copy.apply(x, self.topo.tp_group)
        return _Reduce.apply(F.gelu(x @ self.w1.t()) @ self.w2.t(), self.topo.tp_group)


def reduce_gradients(model, topo):
    for p in model.parameters():
        dist.all_reduce(p.grad, group=topo.dp_group)
        p.grad.div_(topo.dp_size)


def main():
    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    topo = Topology(tp_size=int(os.environ.get("TP", 4)))

    model = nn.Sequential(*[ParallelMLP(1024, 4096, topo) for _ in range(4)]).cuda()
    opt = torch.optim.Adam(model.parameters(), lr=1e-4)
    data_gen = torch.Generator(device="cuda").manual_seed(topo.dp_rank)
    for step in range(1000):
        x = torch.randn(32, 1024, generator=data_gen, device="cuda")
        loss = (model(x) - x.flip(-1)).pow(2).mean()
        opt.zero_grad(set_to_none=True)
        loss.backward()
        reduce_gradients(model, topo)
        opt.step()
        if step % 100 == 0 and dist.get_rank() == 0:
            print(step, loss.item(), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
