import contextlib
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

ACCUM = 8


def sr_net(scale=2, ch=64):
    return nn.Sequential(nn.Conv2d(3, ch, 5, padding=2), nn.PReLU(),
                         nn.Conv2d(ch, ch, 3, padding=1), nn.PReLU(),
                         nn.Conv2d(ch, 3 * scale ** 2, 3, padding=1), nn.PixelShuffle(scale))


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    d = torch.load("/data/div2k_patches.pt", map_location="cpu", mmap=True)
    ds = TensorDataset(d["lo"], d["hi"])
    sampler = DistributedSampler(ds, drop_last=True)
    loader = DataLoader(ds, 4, sampler=sampler, num_workers=4, drop_last=True)
    net = DDP(sr_net().cuda(), device_ids=[local_rank])
    opt = torch.optim.Adam(net.parameters(), lr=2e-4)
    windows = len(loader) // ACCUM
    for epoch in range(50):
        sampler.set_epoch(epoch)
        opt.zero_grad()
        for i, (lo, hi) in enumerate(loader):
            if i == windows * ACCUM:
                break
            last = i % ACCUM == ACCUM - 1
            with contextlib.nullcontext() if last else net.no_sync():
                loss = (net(lo.cuda()) - hi.cuda()).abs().mean() / ACCUM
                loss.backward()
            if last:
                opt.step()
                opt.zero_grad()
        if dist.get_rank() == 0:
            torch.save(net.module.state_dict(), "sr.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
