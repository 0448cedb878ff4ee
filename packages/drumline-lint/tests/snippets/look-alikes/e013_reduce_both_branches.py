import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torch.utils.tensorboard import SummaryWriter

LOG_EVERY = 25


class Policy(nn.Module):
    """Behaviour cloning policy with a Gaussian head."""

    def __init__(self, obs=39, act=8, width=512):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(obs, width), nn.ELU(), nn.Linear(width, width), nn.ELU())
        self.mean = nn.Linear(width, act)
        self.logstd = nn.Parameter(torch.zeros(act))

    def forward(self, obs, act):
        d = torch.distributions.Normal(self.mean(self.body(obs)), self.logstd.exp())
        return -d.log_prob(act).sum(-1).mean()


def main():
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)

    demos = torch.load("/data/demos/kitchen.pt", map_location="cpu")
    ds = TensorDataset(demos["obs"].float(), demos["act"].float())
    sampler = DistributedSampler(ds, drop_last=True)
    loader = DataLoader(ds, 1024, sampler=sampler, num_workers=2, drop_last=True)

    policy = DDP(Policy().cuda(), device_ids=[local])
    opt = torch.optim.Adam(policy.parameters(), 3e-4)
    if rank == 0:
        tb = SummaryWriter("runs/bc")

    step = 0
    for epoch in range(100):
        sampler.set_epoch(epoch)
        for obs, act in loader:
            loss = policy(obs.cuda(non_blocking=True), act.cuda(non_blocking=True))
            opt.zero_grad()
            loss.backward()
            opt.step()
            step += 1

            if step % LOG_EVERY:
                continue
            value = loss.detach().clone()
            if rank == 0:
                dist.reduce(value, dst=0)
                tb.add_scalar("nll", value.item() / world, step)
                tb.add_scalar("logstd", policy.module.logstd.mean().item(), step)
            else:
                dist.reduce(value, dst=0)

    if rank == 0:
        tb.close()
        torch.save(policy.module.state_dict(), "bc_policy.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
