import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Weather(nn.Module):
    def __init__(self, channels=69, d=2048, depth=16):
        super().__init__()
        self.inp = nn.Linear(channels, d)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(d), nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))
            for _ in range(depth))
        self.out = nn.Linear(d, channels)

    def forward(self, x):
        h = self.inp(x)
        for b in self.blocks:
            h = h + b(h)
        return x + self.out(h)


class Snapshotter:
    def __init__(self, root, every):
        self.root, self.every = Path(root), every

    def maybe(self, step, model, optimizer):
        if step % self.every:
            return
        model_sd, optim_sd = get_state_dict(model, optimizer)
        if dist.get_rank() == 0:
            dcp.save({"model": model_sd, "optim": optim_sd}, checkpoint_id=str(self.root / f"step_{step}"))
        dist.barrier()


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    torch.manual_seed(60)
    model = Weather().to(device)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    snap = Snapshotter("/shared/weather", every=500)

    d = torch.load("era5.pt", map_location="cpu", weights_only=True)
    ds = TensorDataset(d["now"], d["next"])
    sampler = DistributedSampler(ds, drop_last=True)
    loader = DataLoader(ds, 2, sampler=sampler, drop_last=True)
    step = 0
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for now, nxt in loader:
            step += 1
            F.mse_loss(model(now.to(device)), nxt.to(device)).backward()
            optimizer.step()
            optimizer.zero_grad()
            snap.maybe(step, model, optimizer)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
