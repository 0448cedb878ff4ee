"""Sharded Adam with checkpoints.  torchrun --standalone --nproc_per_node=4 zero_consolidate.py"""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def checkpoint(path, epoch, model, opt):
    opt.consolidate_state_dict(to=0)
    if dist.get_rank() == 0:
        torch.save({"epoch": epoch, "model": model.module.state_dict(), "opt": opt.state_dict()}, path + ".tmp")
        os.replace(path + ".tmp", path)


def main():
    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    blob = torch.load("/data/spectra.pt", map_location="cpu")
    data = TensorDataset(blob["x"], blob["y"])
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 256, sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(900, 4096), nn.ELU(), nn.Linear(4096, 12)).cuda(), device_ids=[local_rank])
    opt = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.Adam, lr=1e-3)
    for epoch in range(100):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x.cuda()), y.cuda())
            opt.zero_grad()
            loss.backward()
            opt.step()
        if (epoch + 1) % 10 == 0:
            checkpoint("/ckpt/spectra.pt", epoch, model, opt)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
