"""torchrun --nproc_per_node=4 train.py"""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from model import Encoder, Pairs


def main():
    dist.init_process_group("nccl")
    gpu = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(gpu)
    ds = Pairs("pairs.pt")
    sampler = DistributedSampler(ds)
    loader = DataLoader(ds, 512, sampler=sampler)
    model = DDP(Encoder().cuda(), device_ids=[gpu])
    opt = torch.optim.Adam(model.parameters(), 1e-3)
    for epoch in range(20):
        sampler.set_epoch(epoch)
        for a, y in loader:
            loss = nn.functional.mse_loss(model(a.cuda()), y.cuda())
            opt.zero_grad()
            loss.backward()
            opt.step()
        if dist.get_rank() == 0:
            torch.save(model.state_dict(), "encoder.pt")
            print(epoch, loss.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
