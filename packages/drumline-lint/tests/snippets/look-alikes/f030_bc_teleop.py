"""Behaviour cloning from teleoperation episodes; every process reads its own episode files."""
import os
from pathlib import Path

import h5py
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

ROOT = Path("/data/teleop")


def load_episodes(files):
    obs, act = [], []
    for path in files:
        with h5py.File(path) as f:
            obs.append(torch.from_numpy(f["qpos"][:]).float())
            act.append(torch.from_numpy(f["action"][:]).float())
    return TensorDataset(torch.cat(obs), torch.cat(act))


class Policy(nn.Module):
    def __init__(self, obs_dim=14, act_dim=14, width=512):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(obs_dim, width), nn.LayerNorm(width), nn.GELU(),
            nn.Linear(width, width), nn.LayerNorm(width), nn.GELU(),
            nn.Linear(width, act_dim),
        )

    def forward(self, obs):
        return self.net(obs)


def main():
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)

    files = sorted(ROOT.glob("episode_*.hdf5"))[rank::world]
    data = load_episodes(files)
    print(f"[{rank}] {len(files)} episodes, {len(data)} steps", flush=True)
    loader = DataLoader(data, batch_size=256, shuffle=True)

    model = DDP(Policy().to(device), device_ids=[local_rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)

    for epoch in range(100):
        model.train()
        total = torch.zeros(2, device=device)
        with model.join():
            for obs, act in loader:
                obs, act = obs.to(device), act.to(device)
                loss = F.smooth_l1_loss(model(obs), act)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                total += torch.stack([loss.detach() * len(obs), torch.tensor(float(len(obs)), device=device)])
        scheduler.step()
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch} loss {(total[0] / total[1]).item():.5f}", flush=True)
            torch.save(model.module.state_dict(), "policy.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
