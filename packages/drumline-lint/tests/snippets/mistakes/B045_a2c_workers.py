"""Synchronous A2C. torchrun --nproc_per_node 4 a2c.py"""
import argparse
import os
import random

import gymnasium as gym
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributions import Categorical
from torch.nn.parallel import DistributedDataParallel as DDP


class Policy(nn.Module):
    def __init__(self, obs, act):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(obs, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.actor, self.critic = nn.Linear(64, act), nn.Linear(64, 1)

    def forward(self, x):
        h = self.trunk(x)
        return self.actor(h), self.critic(h).squeeze(-1)


class Worker:
    def __init__(self, args, device):
        self.env = gym.make_vec(args.env, num_envs=args.num_envs)
        self.obs, _ = self.env.reset(seed=args.seed)
        self.device, self.steps, self.gamma = device, args.steps, args.gamma

    def collect(self, net):
        obs, acts, rews, dones = [], [], [], []
        for _ in range(self.steps):
            x = torch.as_tensor(self.obs, dtype=torch.float32, device=self.device)
            with torch.no_grad():
                a = Categorical(logits=net(x)[0]).sample()
            self.obs, r, term, trunc, _ = self.env.step(a.cpu().numpy())
            obs.append(x)
            acts.append(a)
            rews.append(torch.as_tensor(r, dtype=torch.float32, device=self.device))
            dones.append(torch.as_tensor(term | trunc, device=self.device))
        with torch.no_grad():
            ret = net(torch.as_tensor(self.obs, dtype=torch.float32, device=self.device))[1]
        rets = []
        for r, d in zip(reversed(rews), reversed(dones)):
            ret = r + self.gamma * ret * (~d)
            rets.append(ret)
        return torch.cat(obs), torch.cat(acts), torch.cat(rets[::-1]), torch.stack(rews).mean()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--env", default="LunarLander-v3")
    p.add_argument("--num-envs", type=int, default=8)
    p.add_argument("--steps", type=int, default=16)
    p.add_argument("--updates", type=int, default=20_000)
    p.add_argument("--gamma", type=float, default=0.99)
    p.add_argument("--seed", type=int, default=0)
    args = p.parse_args()

    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    dist.init_process_group("nccl")
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    device = torch.device("cuda", local)
    worker = Worker(args, device)
    space = worker.env.single_observation_space
    net = Policy(space.shape[0], worker.env.single_action_space.n).to(device)
    ddp = DDP(net, device_ids=[local])
    opt = torch.optim.RMSprop(ddp.parameters(), lr=7e-4, eps=1e-5)
    for u in range(args.updates):
        obs, act, ret, score = worker.collect(net)
        logits, v = ddp(obs)
        d = Categorical(logits=logits)
        adv = (ret - v).detach()
        loss = -(d.log_prob(act) * adv).mean() + 0.5 * (ret - v).pow(2).mean() - 0.01 * d.entropy().mean()
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(ddp.parameters(), 0.5)
        opt.step()
        if u % 100 == 0:
            dist.all_reduce(score, op=dist.ReduceOp.AVG)
            if dist.get_rank() == 0:
                print(u, score.item())
    if dist.get_rank() == 0:
        torch.save(net.state_dict(), "a2c.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
