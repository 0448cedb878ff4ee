"""PPO-style policy training, one environment batch per GPU.
torchrun --nproc_per_node=4 wandb_group.py --run-id ppo-041
"""
import argparse
import os

import gymnasium as gym
import torch
import torch.distributed as dist
import wandb
from torch import nn
from torch.distributions import Categorical
from torch.nn.parallel import DistributedDataParallel as DDP

HORIZON, ENVS = 256, 16


class Policy(nn.Module):
    def __init__(self, obs, act):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(obs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        self.pi, self.v = nn.Linear(64, act), nn.Linear(64, 1)

    def forward(self, x):
        h = self.body(x)
        return self.pi(h), self.v(h).squeeze(-1)


@torch.no_grad()
def collect(net, envs, obs, device):
    O, A, R, D = [], [], [], []
    for _ in range(HORIZON):
        x = torch.as_tensor(obs, dtype=torch.float32, device=device)
        a = Categorical(logits=net(x)[0]).sample()
        obs, r, term, trunc, _ = envs.step(a.cpu().numpy())
        O.append(x)
        A.append(a)
        R.append(torch.as_tensor(r, dtype=torch.float32, device=device))
        D.append(torch.as_tensor(term | trunc, dtype=torch.float32, device=device))
    ret, out = torch.zeros(ENVS, device=device), []
    for r, d in zip(reversed(R), reversed(D)):
        ret = r + 0.99 * ret * (1 - d)
        out.append(ret)
    return torch.cat(O), torch.cat(A), torch.cat(out[::-1]), torch.stack(R).sum().item(), obs


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--run-id", required=True)
    ap.add_argument("--iters", type=int, default=300)
    args = ap.parse_args()
    dist.init_process_group("nccl")
    rank, gpu = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(gpu)
    device = torch.device("cuda", gpu)
    wandb.init(project="ppo", group=args.run_id, name=f"{args.run_id}-r{rank}", job_type=f"rank{rank}")

    torch.manual_seed(rank)
    envs = gym.make_vec("CartPole-v1", num_envs=ENVS)
    obs, _ = envs.reset(seed=10_000 * rank)
    model = DDP(Policy(4, 2).to(device), device_ids=[gpu])
    opt = torch.optim.Adam(model.parameters(), 3e-4)
    for it in range(args.iters):
        o, a, ret, total, obs = collect(model.module, envs, obs, device)
        logits, v = model(o)
        logp = Categorical(logits=logits).log_prob(a)
        loss = -(logp * (ret - v.detach())).mean() + 0.5 * (ret - v).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        wandb.log({"loss": loss.item(), "reward": total / ENVS}, step=it)
    if rank == 0:
        torch.save(model.module.state_dict(), f"{args.run_id}.pt")
    wandb.finish()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
