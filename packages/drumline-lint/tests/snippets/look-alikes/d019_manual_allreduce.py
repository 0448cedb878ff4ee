"""Policy gradient with a hand-written gradient average (no DDP: the graph changes every step)."""
import os

import gymnasium as gym
import torch
import torch.distributed as dist
import torch.nn as nn

STEPS = 5000
HORIZON = 512


class Policy(nn.Module):
    def __init__(self, n_obs, n_act):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(n_obs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        self.pi, self.v = nn.Linear(64, n_act), nn.Linear(64, 1)

    def forward(self, obs):
        h = self.body(obs)
        return torch.distributions.Categorical(logits=self.pi(h)), self.v(h).squeeze(-1)


def rollout(env, obs, policy):
    logps, values, rewards, dones = [], [], [], []
    for _ in range(HORIZON):
        d, v = policy(torch.as_tensor(obs, dtype=torch.float32))
        a = d.sample()
        obs, r, term, trunc, _ = env.step(a.item())
        logps.append(d.log_prob(a))
        values.append(v)
        rewards.append(float(r))
        dones.append(term or trunc)
        if dones[-1]:
            obs, _ = env.reset()
    ret, returns = 0.0, []
    for r, d in zip(reversed(rewards), reversed(dones)):
        ret = r + 0.99 * ret * (not d)
        returns.insert(0, ret)
    return obs, torch.stack(logps), torch.stack(values), torch.tensor(returns), sum(rewards)


@torch.no_grad()
def average_gradients(net):
    flat = torch.cat([p.grad.flatten() for p in net.parameters()])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    offset = 0
    for p in net.parameters():
        p.grad.copy_(flat[offset:offset + p.numel()].view_as(p))
        offset += p.numel()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    env = gym.make(os.environ.get("ENV", "CartPole-v1"))
    torch.manual_seed(90 + rank)
    obs, _ = env.reset(seed=90 + rank)
    policy = Policy(env.observation_space.shape[0], int(env.action_space.n))
    for p in policy.parameters():
        dist.broadcast(p.data, src=0)
    opt = torch.optim.Adam(policy.parameters(), lr=3e-4)

    for step in range(STEPS):
        obs, logp, value, ret, total = rollout(env, obs, policy)
        adv = ret - value.detach()
        loss = -(logp * adv).mean() + 0.5 * (ret - value).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        average_gradients(policy)
        nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
        opt.step()
        if rank == 0 and step % 100 == 0:
            print(f"{step} reward {total:.1f}", flush=True)
    if rank == 0:
        torch.save(policy.state_dict(), "policy.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
