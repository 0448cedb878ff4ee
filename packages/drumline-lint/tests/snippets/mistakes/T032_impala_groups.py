"""Actor/learner DQN. Ranks 0..L-1 are learners, the rest are actors. torchrun --nproc_per_node=8 Q032_impala_groups.py"""
import argparse
import os
from collections import deque

import gymnasium as gym
import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


def make_net(obs_dim, n_act):
    return nn.Sequential(nn.Linear(obs_dim, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, n_act))


def flat(net):
    return torch.cat([p.data.flatten() for p in net.parameters()])


def unflat(net, vec):
    i = 0
    for p in net.parameters():
        p.data.copy_(vec[i:i + p.numel()].view_as(p))
        i += p.numel()


def collect(env, obs, net, n, eps):
    rows = []
    for _ in range(n):
        if np.random.rand() < eps:
            a = env.action_space.sample()
        else:
            with torch.no_grad():
                a = int(net(torch.as_tensor(obs)).argmax())
        nxt, r, term, trunc, _ = env.step(a)
        rows.append(np.concatenate([obs, nxt, [a, r, float(term)]]).astype(np.float32))
        obs = env.reset()[0] if term or trunc else nxt
    return torch.from_numpy(np.stack(rows)), obs


def learn(net, target, opt, batch, d, group, n_learners):
    o, n, a, r, t = batch[:, :d], batch[:, d:2 * d], batch[:, -3].long(), batch[:, -2], batch[:, -1]
    with torch.no_grad():
        y = r + 0.99 * (1 - t) * target(n).max(1).values
    loss = F.smooth_l1_loss(net(o).gather(1, a[:, None]).squeeze(1), y)
    opt.zero_grad()
    loss.backward()
    for p in net.parameters():
        dist.all_reduce(p.grad, group=group)
        p.grad /= n_learners
    opt.step()
    return loss.item()


def main(args):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    is_learner = rank < args.learners
    torch.manual_seed(0)
    np.random.seed(rank)

    env = gym.make(args.env)
    d, n_act = env.observation_space.shape[0], env.action_space.n
    net, target = make_net(d, n_act), make_net(d, n_act)
    target.load_state_dict(net.state_dict())

    learner_group = None
    if is_learner:
        learner_group = dist.new_group(list(range(args.learners)))
        opt = torch.optim.Adam(net.parameters(), lr=args.lr)
        replay = deque(maxlen=args.replay)
    obs, _ = env.reset(seed=rank)

    for it in range(args.iters):
        if is_learner:
            chunk = torch.zeros(args.chunk, 2 * d + 3)
        else:
            chunk, obs = collect(env, obs, net, args.chunk, max(0.05, 1 - it / 500))
        chunks = [torch.zeros_like(chunk) for _ in range(world)]
        dist.all_gather(chunks, chunk)

        if is_learner:
            for c in chunks[args.learners:]:
                replay.extend(c)
            for _ in range(args.updates):
                idx = np.random.randint(len(replay), size=args.batch)
                loss = learn(net, target, opt, torch.stack([replay[i] for i in idx]), d, learner_group, args.learners)
            if it % 20 == 0:
                target.load_state_dict(net.state_dict())
                if rank == 0:
                    print(f"iter {it} replay {len(replay)} loss {loss:.4f}", flush=True)

        weights = flat(net)
        dist.broadcast(weights, src=0)
        unflat(net, weights)

    if rank == 0:
        torch.save(net.state_dict(), "dqn.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    ap = argparse.ArgumentParser()
    ap.add_argument("--env", default="CartPole-v1")
    ap.add_argument("--learners", type=int, default=2)
    ap.add_argument("--iters", type=int, default=2000)
    ap.add_argument("--chunk", type=int, default=64)
    ap.add_argument("--updates", type=int, default=8)
    ap.add_argument("--batch", type=int, default=256)
    ap.add_argument("--replay", type=int, default=100_000)
    ap.add_argument("--lr", type=float, default=3e-4)
    main(ap.parse_args())
