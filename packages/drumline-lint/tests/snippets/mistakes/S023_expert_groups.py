# torchrun --nproc_per_node=8 expert_groups.py   (2-way expert parallel x 4-way data parallel)
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EP = 2


def build_groups(rank, world):
    expert_idx = rank % EP
    members = [r for r in range(world) if r % EP == expert_idx]
    dp_group = dist.new_group(ranks=members)
    return expert_idx, dp_group


class SharedTrunk(nn.Module):
    def __init__(self, d=512):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, d), nn.GELU(), nn.Linear(d, d), nn.GELU())
        self.gate = nn.Linear(d, EP)

    def forward(self, x):
        h = self.net(x)
        return h, self.gate(h).softmax(-1)


class Expert(nn.Module):
    def __init__(self, d=512, out=10):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, out))

    def forward(self, h):
        return self.net(h)


def sync_grads(params, group):
    n = dist.get_world_size(group)
    for p in params:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        dist.all_reduce(p.grad, group=group)
        p.grad.div_(n)


def main():
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    idx, dp_group = build_groups(rank, world)

    torch.manual_seed(0)
    trunk = SharedTrunk().cuda()
    torch.manual_seed(100 + idx)
    expert = Expert().cuda()
    opt = torch.optim.AdamW([*trunk.parameters(), *expert.parameters()], lr=3e-4)

    blob = torch.load("features.pt", map_location="cpu")
    ds = TensorDataset(blob["x"], blob["y"])
    sampler = DistributedSampler(ds, num_replicas=world, rank=rank, drop_last=True)
    loader = DataLoader(ds, 512, sampler=sampler, drop_last=True)

    for epoch in range(20):
        sampler.set_epoch(epoch)
        for x, y in loader:
            h, gate = trunk(x.cuda())
            logits = expert(h) * gate[:, idx:idx + 1]
            loss = nn.functional.cross_entropy(logits, y.cuda())
            opt.zero_grad()
            loss.backward()
            sync_grads(trunk.parameters(), dist.group.WORLD)
            sync_grads(expert.parameters(), dp_group)
            opt.step()
        if rank == 0:
            print(epoch, loss.item())
    if rank < EP:
        torch.save({"trunk": trunk.state_dict(), "expert": expert.state_dict()}, f"moe_expert{idx}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
