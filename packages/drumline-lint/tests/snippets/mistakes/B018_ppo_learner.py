"""Multi process PPO: each rank steps its own vector env, gradients are shared with DDP."""
import os
from dataclasses import dataclass

import gymnasium as gym
import torch
import torch.distributed as dist
from torch import nn
from torch.distributions import Categorical
from torch.nn.parallel import DistributedDataParallel as DDP


@dataclass
class PPOConfig:
    env: str = "CartPole-v1"
    envs: int = 16
    horizon: int = 128
    iters: int = 400
    epochs: int = 4
    lr: float = 2.5e-4
    gamma: float = 0.99
    clip: float = 0.2
    seed: int = 1


class ActorCritic(nn.Module):
    def __init__(self, n_obs, n_act):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(n_obs, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh())
        self.pi, self.v = nn.Linear(128, n_act), nn.Linear(128, 1)

    def forward(self, obs):
        h = self.body(obs)
        return self.pi(h), self.v(h).squeeze(-1)

    def evaluate_actions(self, obs, act):
        logits, value = self(obs)
        d = Categorical(logits=logits)
        return d.log_prob(act), d.entropy(), value


def rollout(envs, policy, obs, cfg, device):
    buf = {k: [] for k in ("obs", "act", "logp", "rew", "done", "val")}
    for _ in range(cfg.horizon):
        o = torch.as_tensor(obs, dtype=torch.float32, device=device)
        with torch.no_grad():
            logits, v = policy.module(o)
        d = Categorical(logits=logits)
        a = d.sample()
        obs, r, term, trunc, _ = envs.step(a.cpu().numpy())
        for k, x in zip(buf, (o, a, d.log_prob(a), r, term | trunc, v)):
            buf[k].append(torch.as_tensor(x, device=device))
    return obs, {k: torch.stack(v) for k, v in buf.items()}


def returns(buf, gamma):
    out, acc = torch.zeros_like(buf["val"]), buf["val"][-1]
    for t in reversed(range(len(out))):
        acc = buf["rew"][t].float() + gamma * acc * (~buf["done"][t].bool())
        out[t] = acc
    return out


def main(cfg=PPOConfig()):
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    device = torch.device("cuda", local)
    torch.manual_seed(cfg.seed + rank)
    envs = gym.make_vec(cfg.env, num_envs=cfg.envs)
    obs, _ = envs.reset(seed=cfg.seed + 1000 * rank)
    net = ActorCritic(envs.single_observation_space.shape[0], envs.single_action_space.n).to(device)
    policy = DDP(net, device_ids=[local])
    opt = torch.optim.Adam(policy.parameters(), lr=cfg.lr, eps=1e-5)
    for it in range(cfg.iters):
        obs, buf = rollout(envs, policy, obs, cfg, device)
        ret = returns(buf, cfg.gamma).flatten()
        o, a, old = buf["obs"].flatten(0, 1), buf["act"].flatten(), buf["logp"].flatten()
        adv = ret - buf["val"].flatten()
        adv = (adv - adv.mean()) / (adv.std() + 1e-8)
        for _ in range(cfg.epochs):
            logp, ent, val = policy.module.evaluate_actions(o, a)
            ratio = (logp - old).exp()
            surr = torch.min(ratio * adv, ratio.clamp(1 - cfg.clip, 1 + cfg.clip) * adv)
            loss = -surr.mean() + 0.5 * (val - ret).pow(2).mean() - 0.01 * ent.mean()
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
            opt.step()
        score = buf["rew"].float().mean()
        dist.all_reduce(score, op=dist.ReduceOp.AVG)
        if rank == 0:
            print(it, round(score.item(), 3))
    if rank == 0:
        torch.save(net.state_dict(), "ppo.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
