"""PPO on MuJoCo, one environment batch per process, gradients averaged by DDP.

torchrun --nproc_per_node=8 F040_ppo_distributed.py --env HalfCheetah-v4
"""
import argparse

import gymnasium as gym
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributions import Normal
from torch.nn.parallel import DistributedDataParallel as DDP


class ActorCritic(nn.Module):
    def __init__(self, obs_dim, act_dim):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(obs_dim, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh())
        self.mu = nn.Linear(256, act_dim)
        self.v = nn.Linear(256, 1)
        self.log_std = nn.Parameter(torch.zeros(act_dim))

    def forward(self, obs):
        h = self.body(obs)
        return self.mu(h), self.log_std.exp(), self.v(h).squeeze(-1)


def rollout(net, envs, obs, horizon, gamma=0.99, lam=0.95):
    store = {k: [] for k in ("obs", "act", "logp", "val", "rew", "done")}
    with torch.no_grad():
        for _ in range(horizon):
            mu, std, val = net(obs)
            pi = Normal(mu, std)
            act = pi.sample()
            nxt, rew, term, trunc, _ = envs.step(act.numpy())
            for k, v in (("obs", obs), ("act", act), ("logp", pi.log_prob(act).sum(-1)), ("val", val),
                         ("rew", torch.as_tensor(rew).float()), ("done", torch.as_tensor(term | trunc).float())):
                store[k].append(v)
            obs = torch.as_tensor(nxt).float()
        last = net(obs)[2]
    data = {k: torch.stack(v) for k, v in store.items()}
    adv, running = torch.zeros_like(data["rew"]), torch.zeros_like(last)
    for t in reversed(range(horizon)):
        nextval = data["val"][t + 1] if t + 1 < horizon else last
        delta = data["rew"][t] + gamma * nextval * (1 - data["done"][t]) - data["val"][t]
        running = delta + gamma * lam * (1 - data["done"][t]) * running
        adv[t] = running
    data["ret"] = adv + data["val"]
    data["adv"] = (adv - adv.mean()) / (adv.std() + 1e-8)
    return {k: v.flatten(0, 1) for k, v in data.items()}, obs


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--env", default="HalfCheetah-v4")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--num-envs", type=int, default=8)
    p.add_argument("--updates", type=int, default=500)
    args = p.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)

    envs = gym.vector.make(args.env, num_envs=args.num_envs)
    obs = torch.as_tensor(envs.reset(seed=args.seed)[0]).float()
    net = ActorCritic(envs.single_observation_space.shape[0], envs.single_action_space.shape[0])
    model = DDP(net)
    opt = torch.optim.Adam(model.parameters(), lr=3e-4)

    for update in range(args.updates):
        data, obs = rollout(net, envs, obs, horizon=256)
        for _ in range(10):
            for idx in torch.randperm(len(data["adv"])).split(256):
                mu, std, val = model(data["obs"][idx])
                pi = Normal(mu, std)
                ratio = (pi.log_prob(data["act"][idx]).sum(-1) - data["logp"][idx]).exp()
                adv = data["adv"][idx]
                policy = -torch.min(ratio * adv, ratio.clamp(0.8, 1.2) * adv).mean()
                loss = policy + 0.5 * (val - data["ret"][idx]).pow(2).mean()
                opt.zero_grad()
                loss.backward()
                opt.step()
        if rank == 0 and update % 10 == 0:
            print(f"update {update} mean reward {data['rew'].mean().item():.3f}", flush=True)
            torch.save(net.state_dict(), "ppo.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
