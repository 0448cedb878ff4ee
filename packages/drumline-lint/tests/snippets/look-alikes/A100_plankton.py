import logging
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def get_logger(folder, rank):
    folder.mkdir(parents=True, exist_ok=True)
    logger = logging.getLogger("train")
    logger.setLevel(logging.INFO)
    handler = logging.FileHandler(folder / f"rank{rank:03d}.log")
    handler.setFormatter(logging.Formatter(f"%(asctime)s [rank {rank}] %(message)s"))
    logger.addHandler(handler)
    return logger


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    rank = dist.get_rank()
    torch.manual_seed(47 + rank)
    log = get_logger(Path("/shared/logs/plankton"), rank)
    d = torch.load("plankton.pt", map_location="cpu", weights_only=True)
    ds = TensorDataset(d["x"], d["y"])
    sampler = DistributedSampler(ds, seed=47, drop_last=True)
    loader = DataLoader(ds, 64, sampler=sampler, num_workers=2, drop_last=True)
    net = nn.Sequential(nn.Conv2d(1, 32, 5), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(512, 121))
    model = DDP(net.to(device), device_ids=[local_rank])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(30):
        sampler.set_epoch(epoch)
        begun = time.perf_counter()
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        torch.cuda.synchronize()
        mem = torch.cuda.max_memory_allocated() / 2 ** 20
        log.info("epoch %d took %.1f s, peak %.0f MiB", epoch, time.perf_counter() - begun, mem)
        if rank == 0:
            torch.save(model.module.state_dict(), "plankton_net.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
