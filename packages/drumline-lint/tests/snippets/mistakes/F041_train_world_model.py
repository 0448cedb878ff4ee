"""Data-parallel training of a recurrent world model without DDP (truncated BPTT keeps
its own graph, so gradients are averaged by hand after the last chunk)."""
import argparse
import os
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Episodes(Dataset):
    def __init__(self, root, length=200):
        self.files = sorted(Path(root).glob("*.npz"))
        self.length = length

    def __len__(self):
        return len(self.files)

    def __getitem__(self, i):
        with np.load(self.files[i]) as ep:
            obs, act = ep["obs"][: self.length], ep["act"][: self.length]
        return torch.from_numpy(obs).float(), torch.from_numpy(act).float()


class WorldModel(nn.Module):
    def __init__(self, obs_dim=39, act_dim=6, hidden=512):
        super().__init__()
        self.cell = nn.LSTM(obs_dim + act_dim, hidden, batch_first=True)
        self.head = nn.Linear(hidden, obs_dim)

    def forward(self, obs, act, state=None):
        h, state = self.cell(torch.cat([obs, act], dim=-1), state)
        return self.head(h), state


def average_gradients(model):
    for param in model.parameters():
        if param.grad is None:
            continue
        dist.all_reduce(param.grad, op=dist.ReduceOp.SUM)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--episodes", required=True)
    parser.add_argument("--epochs", type=int, default=50)
    parser.add_argument("--chunk", type=int, default=50)
    parser.add_argument("--lr", type=float, default=0.05)
    args = parser.parse_args()

    dist.init_process_group("nccl")
    rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)

    data = Episodes(args.episodes)
    sampler = DistributedSampler(data, shuffle=True, drop_last=True)
    loader = DataLoader(data, 32, sampler=sampler, num_workers=4, drop_last=True)

    model = WorldModel().to(device)
    for tensor in model.state_dict().values():
        dist.broadcast(tensor, src=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for obs, act in loader:
            obs, act = obs.to(device), act.to(device)
            optimizer.zero_grad()
            state = None
            for t in range(0, obs.size(1) - 1, args.chunk):
                target = obs[:, t + 1:t + 1 + args.chunk]
                pred, state = model(obs[:, t:t + target.size(1)], act[:, t:t + target.size(1)], state)
                loss = F.mse_loss(pred, target)
                loss.backward()
                state = tuple(s.detach() for s in state)
            average_gradients(model)
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.5f}", flush=True)
            torch.save(model.state_dict(), "world_model.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
