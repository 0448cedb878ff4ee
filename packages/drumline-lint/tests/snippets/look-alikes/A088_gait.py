import os
import random

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset, random_split

SEED = 2025


def seed_worker(_):
    s = torch.initial_seed() % 2 ** 32
    np.random.seed(s)
    random.seed(s)


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    rank, world = dist.get_rank(), dist.get_world_size()
    for fn in (random.seed, np.random.seed, torch.manual_seed):
        fn(SEED + rank)

    d = torch.load("gait.pt", map_location="cpu", weights_only=True)
    full = TensorDataset(d["x"], d["subject"])
    train, val = random_split(full, [0.9, 0.1], generator=torch.Generator().manual_seed(SEED))
    sampler = DistributedSampler(train, seed=SEED, drop_last=True)
    loader = DataLoader(train, 128, sampler=sampler, num_workers=4, worker_init_fn=seed_worker, drop_last=True)
    val_loader = DataLoader(Subset(val, range(rank, len(val), world)), 256)
    net = nn.Sequential(nn.Linear(600, 512), nn.ReLU(), nn.Dropout(0.4), nn.Linear(512, 50)).to(device)
    model = DDP(net, device_ids=[local_rank])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(25):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            x = x.to(device)
            x = x + 0.05 * torch.randn_like(x)
            loss = nn.functional.cross_entropy(model(x), y.to(device))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
    net.eval()
    counts = torch.zeros(2, device=device)
    with torch.no_grad():
        for x, y in val_loader:
            counts[0] += (net(x.to(device)).argmax(1) == y.to(device)).sum()
            counts[1] += y.numel()
    dist.all_reduce(counts)
    if rank == 0:
        print(f"accuracy {(counts[0] / counts[1]).item():.4f}")
        torch.save(net.state_dict(), "gait_net.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
