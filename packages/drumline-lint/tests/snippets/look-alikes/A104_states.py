import os
import time

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Alarm:
    def __init__(self, minutes, device):
        self.period, self.last = 60 * minutes, time.monotonic()
        self.flag = torch.zeros(1, dtype=torch.uint8, device=device)

    def due(self):
        self.flag.zero_()
        if dist.get_rank() == 0 and time.monotonic() - self.last > self.period:
            self.flag.fill_(1)
        dist.broadcast(self.flag, src=0)
        if self.flag.item():
            self.last = time.monotonic()
            return True
        return False


class Stack(nn.Module):
    def __init__(self, d=3072, n=16):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(d), nn.Linear(d, d), nn.SiLU()) for _ in range(n))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


def save(model, optimizer, step):
    model_sd, optim_sd = get_state_dict(model, optimizer)
    dcp.save({"model": model_sd, "optim": optim_sd}, checkpoint_id=f"/shared/stack/{step:07d}")


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    torch.manual_seed(83)
    model = Stack().to(device)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    d = torch.load("states.pt", map_location="cpu", weights_only=True)
    ds = TensorDataset(d["now"], d["next"])
    sampler = DistributedSampler(ds, seed=83, drop_last=True)
    loader = DataLoader(ds, 32, sampler=sampler, drop_last=True)
    alarm, step = Alarm(15, device), 0
    for epoch in range(5):
        sampler.set_epoch(epoch)
        for now, nxt in loader:
            step += 1
            nn.functional.mse_loss(model(now.to(device)), nxt.to(device)).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if alarm.due():
                save(model, optimizer, step)
    save(model, optimizer, step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
