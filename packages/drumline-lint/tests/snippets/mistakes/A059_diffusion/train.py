import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from denoiser import Denoiser
from sprites import sprite_loader
from tools import connect, seed_all

T = 1000


def q_sample(x0, t, noise, alphas):
    a = alphas[t].view(-1, 1, 1, 1)
    return a.sqrt() * x0 + (1 - a).sqrt() * noise


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--seed", type=int, default=123)
    p.add_argument("--epochs", type=int, default=200)
    args = p.parse_args()
    device = connect()
    seed_all(args.seed)
    alphas = torch.cumprod(1 - torch.linspace(1e-4, 0.02, T, device=device), 0)
    loader, sampler = sprite_loader("sprites.pt", 64, args.seed)
    model = DDP(Denoiser().to(device), device_ids=[device.index])
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-4)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for (x0,) in loader:
            x0 = x0.to(device)
            t = torch.randint(0, T, (x0.size(0),), device=device)
            noise = torch.randn_like(x0)
            loss = F.mse_loss(model(q_sample(x0, t, noise, alphas), t), noise)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            torch.save(model.module.state_dict(), "denoiser.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
