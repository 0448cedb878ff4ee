"""Distributed PPO. torchrun --standalone --nproc_per_node=4 Q016_ppo_procgen.py"""
import argparse
import os
import random

import gymnasium as gym
import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributions import Categorical
from torch.nn.parallel import DistributedDataParallel as DDP


class ActorCritic(nn.Module):
    def __init__(self, obs, act):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(obs, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh())
        self.pi = nn.Linear(128, act)
        self.v = nn.Linear(128, 1)

    def forward(self, x):
        h = self.body(x)
        return self.pi(h), self.v(h).squeeze(-1)


def make_env(env_id, seed, idx):
    def thunk():
        env = gym.wrappers.RecordEpisodeStatistics(gym.make(env_id))
        env.action_space.seed(seed + idx)
        return env
    return thunk


def gae(rew, done, val, last, gamma=0.99, lam=0.95):
    adv = torch.zeros_like(rew)
    run = 0
    for t in reversed(range(len(rew))):
        nxt = last if t == len(rew) - 1 else val[t + 1]
        delta = rew[t] + gamma * nxt * (1 - done[t]) - val[t]
        run = delta + gamma * lam * (1 - done[t]) * run
        adv[t] = run
    return adv, adv + val


def main(args):
    local_rank = int(os.environ["LOCAL_RANK"])
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    dev = torch.device("cuda", local_rank)

    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)

    envs = gym.vector.SyncVectorEnv([make_env(args.env, args.seed, i) for i in range(args.envs)])
    net = ActorCritic(envs.single_observation_space.shape[0], envs.single_action_space.n).to(dev)
    ddp = DDP(net, device_ids=[local_rank])
    opt = torch.optim.Adam(ddp.parameters(), lr=args.lr, eps=1e-5)

    obs, _ = envs.reset(seed=args.seed)
    obs = torch.as_tensor(obs, dtype=torch.float32, device=dev)

    for it in range(args.iters):
        O, A, L, R, D, V = [], [], [], [], [], []
        for _ in range(args.steps):
            with torch.no_grad():
                logits, v = net(obs)
            d = Categorical(logits=logits)
            a = d.sample()
            nxt, r, term, trunc, _ = envs.step(a.cpu().numpy())
            O.append(obs); A.append(a); L.append(d.log_prob(a)); V.append(v)
            R.append(torch.as_tensor(r, dtype=torch.float32, device=dev))
            D.append(torch.as_tensor(term | trunc, dtype=torch.float32, device=dev))
            obs = torch.as_tensor(nxt, dtype=torch.float32, device=dev)
        with torch.no_grad():
            last = net(obs)[1]
        O, A, L, R, D, V = map(torch.stack, (O, A, L, R, D, V))
        adv, ret = gae(R, D, V, last)
        O, A, L, adv, ret = (t.flatten(0, 1) for t in (O, A, L, adv, ret))
        adv = (adv - adv.mean()) / (adv.std() + 1e-8)

        for _ in range(args.epochs):
            for mb in torch.randperm(len(A), device=dev).chunk(args.minibatches):
                logits, v = ddp(O[mb])
                d = Categorical(logits=logits)
                ratio = (d.log_prob(A[mb]) - L[mb]).exp()
                pg = -torch.min(ratio * adv[mb], ratio.clamp(0.8, 1.2) * adv[mb]).mean()
                loss = pg + 0.5 * (v - ret[mb]).pow(2).mean() - 0.01 * d.entropy().mean()
                opt.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(ddp.parameters(), 0.5)
                opt.step()

        mean_r = R.sum(0).mean()
        dist.all_reduce(mean_r)
        if rank == 0:
            print(f"iter {it} reward/rollout {(mean_r / dist.get_world_size()).item():.2f}")
    if rank == 0:
        torch.save(net.state_dict(), "ppo.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--env", default="LunarLander-v2")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--envs", type=int, default=16)
    p.add_argument("--steps", type=int, default=128)
    p.add_argument("--iters", type=int, default=500)
    p.add_argument("--epochs", type=int, default=4)
    p.add_argument("--minibatches", type=int, default=4)
    p.add_argument("--lr", type=float, default=2.5e-4)
    main(p.parse_args())
