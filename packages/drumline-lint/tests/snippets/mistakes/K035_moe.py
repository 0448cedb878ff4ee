import os

import torch
import torch.distributed as dist
from torch import nn

GROUP = 4


def build_groups():
    rank, world = dist.get_rank(), dist.get_world_size()
    first = rank // GROUP * GROUP
    members = list(range(first, min(first + GROUP, world)))
    return dist.new_group(ranks=members), members


class Router(nn.Module):
    def __init__(self, dim, experts):
        super().__init__()
        self.gate = nn.Linear(dim, experts)
        self.experts = nn.ModuleList(nn.Linear(dim, dim) for _ in range(experts))

    def forward(self, x):
        w = self.gate(x).softmax(-1)
        y = torch.stack([e(x) for e in self.experts], -1)
        return (y * w.unsqueeze(1)).sum(-1)


def average_grads(net, group, size):
    for p in net.parameters():
        dist.all_reduce(p.grad, group=group)
        p.grad /= size


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    group, members = build_groups()
    torch.manual_seed(members[0])
    net = Router(256, 8).cuda()
    opt = torch.optim.Adam(net.parameters(), lr=1e-3)
    gen = torch.Generator(device="cuda").manual_seed(1000 + dist.get_rank())
    for step in range(5000):
        x = torch.randn(512, 256, device="cuda", generator=gen)
        loss = nn.functional.mse_loss(net(x), x.roll(1, dims=1))
        opt.zero_grad()
        loss.backward()
        average_grads(net, group, len(members))
        opt.step()
    if dist.get_rank() == members[0]:
        torch.save(net.state_dict(), f"router_{members[0]}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
