import os
from dataclasses import dataclass

import gymnasium as gym
import torch
import torch.distributed as dist
from torch import nn
from torch.distributions import Categorical
from torch.nn.parallel import DistributedDataParallel as DDP


@dataclass
class Config:
    env: str = "Acrobot-v1"
    envs: int = 16
    steps: int = 32
    updates: int = 5000
    gamma: float = 0.99
    lr: float = 7e-4
    seed: int = 10


class ActorCritic(nn.Module):
    def __init__(self, n_obs, n_act):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(n_obs, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh())
        self.pi, self.v = nn.Linear(128, n_act), nn.Linear(128, 1)

    def forward(self, x):
        h = self.body(x)
        return self.pi(h), self.v(h).squeeze(-1)


@torch.no_grad()
def collect(policy, envs, obs, cfg, device):
    steps = []
    for _ in range(cfg.steps):
        x = torch.as_tensor(obs, dtype=torch.float32, device=device)
        action = Categorical(logits=policy.module(x)[0]).sample()
        obs, r, term, trunc, _ = envs.step(action.cpu().numpy())
        steps.append((x, action, torch.as_tensor(r, dtype=torch.float32, device=device),
                      torch.as_tensor(term | trunc, device=device)))
    ret = policy.module(torch.as_tensor(obs, dtype=torch.float32, device=device))[1]
    returns = []
    for _, _, r, done in reversed(steps):
        ret = r + cfg.gamma * ret * (~done)
        returns.append(ret)
    x, a, r, _ = zip(*steps)
    return obs, torch.cat(x), torch.cat(a), torch.cat(returns[::-1]), torch.stack(r).mean()


def main(cfg=Config()):
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    rank = dist.get_rank()
    torch.manual_seed(cfg.seed + rank)
    envs = gym.make_vec(cfg.env, num_envs=cfg.envs)
    obs, _ = envs.reset(seed=cfg.seed + rank * cfg.envs)
    net = ActorCritic(envs.single_observation_space.shape[0], envs.single_action_space.n).to(device)
    policy = DDP(net, device_ids=[local_rank])
    opt = torch.optim.RMSprop(policy.parameters(), lr=cfg.lr)
    for update in range(cfg.updates):
        obs, x, a, ret, reward = collect(policy, envs, obs, cfg, device)
        logits, v = policy(x)
        d = Categorical(logits=logits)
        adv = (ret - v).detach()
        loss = -(d.log_prob(a) * adv).mean() + 0.5 * (ret - v).pow(2).mean() - 0.01 * d.entropy().mean()
        opt.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
        opt.step()
        if update % 100 == 0:
            dist.all_reduce(reward, op=dist.ReduceOp.AVG)
            if rank == 0:
                print(f"update {update} reward {reward.item():.3f}")
    if rank == 0:
        torch.save(net.state_dict(), "a2c.pt")
    envs.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
