import argparse
import os

import gymnasium as gym
import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


def mlp(i, o):
    return nn.Sequential(nn.Linear(i, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, o))


class Replay:
    def __init__(self, n, d):
        self.s, self.s2 = np.zeros((n, d), np.float32), np.zeros((n, d), np.float32)
        self.a, self.r, self.t = np.zeros(n, np.int64), np.zeros(n, np.float32), np.zeros(n, np.float32)
        self.n, self.i, self.full = n, 0, False

    def add(self, s, a, r, s2, t):
        i = self.i
        self.s[i], self.a[i], self.r[i], self.s2[i], self.t[i] = s, a, r, s2, t
        self.i = (i + 1) % self.n
        self.full |= self.i == 0

    def sample(self, k, dev):
        idx = np.random.randint(self.n if self.full else self.i, size=k)
        return [torch.from_numpy(v[idx]).to(dev) for v in (self.s, self.a, self.r, self.s2, self.t)]


def main(args):
    local_rank = int(os.environ["LOCAL_RANK"])
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    dev = torch.device("cuda", local_rank)
    seed = args.seed + 1000 * rank
    np.random.seed(seed)
    torch.manual_seed(seed)

    env = gym.make("Acrobot-v1")
    d, k = env.observation_space.shape[0], env.action_space.n
    q = DDP(mlp(d, k).to(dev), device_ids=[local_rank])
    tgt = mlp(d, k).to(dev)
    tgt.load_state_dict(q.module.state_dict())
    opt = torch.optim.Adam(q.parameters(), 5e-4)
    buf = Replay(50_000, d)
    s, _ = env.reset(seed=seed)
    env.action_space.seed(seed)

    for t in range(args.steps):
        eps = max(0.05, 1 - t / 20_000)
        if np.random.rand() < eps:
            a = int(env.action_space.sample())
        else:
            with torch.no_grad():
                a = int(q.module(torch.as_tensor(s, device=dev)).argmax())
        s2, r, term, trunc, _ = env.step(a)
        buf.add(s, a, r, s2, term)
        s = env.reset()[0] if term or trunc else s2
        if t >= 1000 and t % 4 == 0:
            S, A, R, S2, T = buf.sample(64, dev)
            with torch.no_grad():
                y = R + 0.99 * (1 - T) * tgt(S2).amax(1)
            loss = F.smooth_l1_loss(q(S).gather(1, A[:, None]).squeeze(1), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        if t % 1000 == 0:
            tgt.load_state_dict(q.module.state_dict())
            if rank == 0:
                torch.save(tgt.state_dict(), "acrobot.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--steps", type=int, default=200_000)
    main(p.parse_args())
