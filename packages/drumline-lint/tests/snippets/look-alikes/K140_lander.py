import os

import gymnasium as gym
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class ActorCritic(nn.Module):
    def __init__(self, obs, acts):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(obs, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh())
        self.pi, self.v = nn.Linear(128, acts), nn.Linear(128, 1)

    def forward(self, x):
        h = self.body(x)
        return torch.distributions.Categorical(logits=self.pi(h)).logits, self.v(h).squeeze(-1)


def main(updates=5000, horizon=64, gamma=0.99):
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    envs = gym.make_vec("LunarLander-v3", num_envs=16)
    obs, _ = envs.reset(seed=1000 * rank)
    net = ActorCritic(envs.single_observation_space.shape[0], envs.single_action_space.n)
    net = DDP(net.cuda(), device_ids=[local_rank])
    opt = torch.optim.Adam(net.parameters(), lr=3e-4)
    for update in range(updates):
        states, actions, rewards, ends = [], [], [], []
        for _ in range(horizon):
            s = torch.as_tensor(obs, dtype=torch.float32, device="cuda")
            with torch.no_grad():
                logits, _ = net.module(s)
            a = torch.distributions.Categorical(logits=logits).sample()
            obs, r, term, trunc, _ = envs.step(a.cpu().numpy())
            states.append(s)
            actions.append(a)
            rewards.append(torch.as_tensor(r, dtype=torch.float32, device="cuda"))
            ends.append(torch.as_tensor(np.logical_or(term, trunc), dtype=torch.float32, device="cuda"))
        with torch.no_grad():
            ret = net.module(torch.as_tensor(obs, dtype=torch.float32, device="cuda"))[1]
            returns = []
            for r, e in zip(reversed(rewards), reversed(ends)):
                ret = r + gamma * ret * (1 - e)
                returns.append(ret)
            target = torch.cat(returns[::-1])
        logits, value = net(torch.cat(states))
        lp = torch.distributions.Categorical(logits=logits).log_prob(torch.cat(actions))
        adv = (target - value).detach()
        loss = -(lp * adv).mean() + 0.5 * (target - value).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        if rank == 0 and update % 500 == 0:
            torch.save(net.module.state_dict(), "lander.pt")
    envs.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
