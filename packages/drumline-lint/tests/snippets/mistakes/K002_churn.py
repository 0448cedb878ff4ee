import os

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

LOG_EVERY = 50


def mean_over_ranks(value):
    t = value.detach().clone()
    dist.all_reduce(t, op=dist.ReduceOp.SUM)
    return (t / dist.get_world_size()).item()


def load_table(path):
    arr = np.load(path)
    x = torch.from_numpy(arr["features"]).float()
    y = torch.from_numpy(arr["churned"]).float()
    return TensorDataset(x, y)


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group(backend="nccl")
    is_main = dist.get_rank() == 0

    ds = load_table("/data/churn/train.npz")
    sampler = DistributedSampler(ds, drop_last=True)
    loader = DataLoader(ds, batch_size=4096, sampler=sampler, num_workers=2, drop_last=True)

    net = nn.Sequential(nn.Linear(212, 256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 1))
    net = DistributedDataParallel(net.cuda(local_rank), device_ids=[local_rank])
    opt = torch.optim.Adam(net.parameters(), lr=3e-4)
    bce = nn.BCEWithLogitsLoss()

    step = 0
    for epoch in range(12):
        sampler.set_epoch(epoch)
        for x, y in loader:
            x = x.cuda(local_rank, non_blocking=True)
            y = y.cuda(local_rank, non_blocking=True)
            opt.zero_grad()
            loss = bce(net(x).squeeze(1), y)
            loss.backward()
            opt.step()
            step += 1
            if is_main and step % LOG_EVERY == 0:
                avg = mean_over_ranks(loss)
                print(f"epoch {epoch} step {step} loss {avg:.4f}", flush=True)
    if is_main:
        torch.save(net.module.state_dict(), "churn_mlp.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
