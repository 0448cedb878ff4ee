"""REINFORCE on LunarLander; eight actors share one policy through DDP (CPU, gloo).

torchrun --standalone --nproc_per_node=8 reinforce.py
"""
import gymnasium as gym
import torch
import torch.distributed as dist
from torch import nn
from torch.distributions import Categorical
from torch.nn.parallel import DistributedDataParallel

CFG = {"env": "LunarLander-v3", "seed": 7, "updates": 3000, "gamma": 0.99, "lr": 3e-4}

dist.init_process_group("gloo")
rank = dist.get_rank()
seed = CFG["seed"]
torch.manual_seed(seed)

env = gym.make(CFG["env"])
policy = DistributedDataParallel(nn.Sequential(nn.Linear(8, 128), nn.Tanh(), nn.Linear(128, 4)))
opt = torch.optim.Adam(policy.parameters(), lr=CFG["lr"])
obs, _ = env.reset(seed=seed)

for update in range(CFG["updates"]):
    states, actions, rewards = [], [], []
    done = False
    while not done:
        state = torch.as_tensor(obs, dtype=torch.float32)
        with torch.no_grad():
            action = Categorical(logits=policy.module(state)).sample()
        obs, reward, terminated, truncated, _ = env.step(action.item())
        done = terminated or truncated
        states.append(state)
        actions.append(action)
        rewards.append(reward)
    obs, _ = env.reset()

    returns, running = [], 0.0
    for r in reversed(rewards):
        running = r + CFG["gamma"] * running
        returns.insert(0, running)
    returns = torch.tensor(returns, dtype=torch.float32)
    returns = (returns - returns.mean()) / (returns.std() + 1e-6)

    logp = Categorical(logits=policy(torch.stack(states))).log_prob(torch.stack(actions))
    loss = -(logp * returns).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()

    score = torch.tensor(sum(rewards), dtype=torch.float32)
    dist.all_reduce(score)
    if rank == 0 and update % 50 == 0:
        print(f"update {update}: mean return {score.item() / dist.get_world_size():.1f}")

if rank == 0:
    torch.save(policy.module.state_dict(), "policy.pt")
dist.destroy_process_group()
