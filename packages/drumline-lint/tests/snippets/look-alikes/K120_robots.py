import os
import random

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

ROBOTS = {"panda": 7, "ur5": 6, "spot": 12}


class Policy(nn.Module):
    def __init__(self, obs=128):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(obs, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU())
        self.arm = nn.ModuleDict({k: nn.Linear(512, n) for k, n in ROBOTS.items()})

    def forward(self, obs, robot):
        return self.arm[robot](self.body(obs))


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    sources = {}
    for k in ROBOTS:
        d = torch.load(f"/data/demos/{k}.pt", map_location="cpu")
        ds = TensorDataset(d["obs"], d["act"])
        s = DistributedSampler(ds, drop_last=True)
        sources[k] = (s, DataLoader(ds, 512, sampler=s, drop_last=True))
    net = DDP(Policy().cuda(), device_ids=[local_rank], find_unused_parameters=True)
    opt = torch.optim.Adam(net.parameters(), lr=3e-4)
    for epoch in range(20):
        order = []
        for k, (s, dl) in sources.items():
            s.set_epoch(epoch)
            order.extend([k] * len(dl))
        random.Random(epoch).shuffle(order)
        its = {k: iter(dl) for k, (_, dl) in sources.items()}
        for k in order:
            obs, act = next(its[k])
            loss = nn.functional.mse_loss(net(obs.cuda(), k), act.cuda())
            opt.zero_grad()
            loss.backward()
            opt.step()
        if dist.get_rank() == 0:
            torch.save(net.module.state_dict(), "policy.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
