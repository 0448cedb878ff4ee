"""Distributed DQN: every process has its own environment and buffer, gradients are averaged."""
import collections
import copy
import random

import gymnasium as gym
import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

ENV = "LunarLander-v2"
SEED = 100
STEPS = 200_000
WARMUP = 2_000
GAMMA = 0.99


def seed_all(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def mlp(obs_dim, actions):
    return nn.Sequential(nn.Linear(obs_dim, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, actions))


def sample(buffer, n):
    rows = random.sample(buffer, n)
    obs, act, rew, nxt, done = map(np.array, zip(*rows))
    return (torch.from_numpy(obs).float(), torch.from_numpy(act), torch.from_numpy(rew).float(),
            torch.from_numpy(nxt).float(), torch.from_numpy(done).float())


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    seed_all(SEED + rank)
    torch.set_num_threads(2)

    env = gym.make(ENV)
    q = mlp(env.observation_space.shape[0], env.action_space.n)
    model = DDP(q)
    target = copy.deepcopy(q).requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-4)
    buffer = collections.deque(maxlen=100_000)
    floor = 0.02 + 0.1 * rank / world  # some actors explore more

    obs, _ = env.reset(seed=SEED + rank)
    returns, total = collections.deque(maxlen=50), 0.0
    for step in range(STEPS):
        eps = max(floor, 1 - step / 50_000)
        if random.random() < eps:
            action = random.randrange(int(env.action_space.n))
        else:
            with torch.no_grad():
                action = int(q(torch.from_numpy(obs).float()).argmax())
        nxt, reward, term, trunc, _ = env.step(action)
        buffer.append((obs, action, reward, nxt, term))
        total += reward
        obs = nxt
        if term or trunc:
            returns.append(total)
            total = 0.0
            obs, _ = env.reset()

        if step >= WARMUP and step % 4 == 0:
            o, a, r, n, d = sample(buffer, 64)
            with torch.no_grad():
                goal = r + GAMMA * (1 - d) * target(n).amax(1)
            loss = F.smooth_l1_loss(model(o).gather(1, a[:, None]).squeeze(1), goal)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if step % 1000 == 0:
            target.load_state_dict(q.state_dict())
            stats = torch.tensor([sum(returns), float(len(returns))])
            dist.all_reduce(stats)
            if rank == 0:
                print(f"{step} return {(stats[0] / stats[1].clamp(min=1)).item():.1f}", flush=True)
                torch.save(q.state_dict(), "dqn.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
