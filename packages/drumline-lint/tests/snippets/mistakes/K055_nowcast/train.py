import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from nowcast import Frames, NowNet
from stats import load_stats, make_stats


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    if rank == 0:
        make_stats("/data/radar_seq", "/data/radar_seq/stats.pt")
    mean, std = load_stats("/data/radar_seq/stats.pt")
    ds = Frames("/data/radar_seq", mean, std)
    sampler = DistributedSampler(ds, drop_last=True)
    loader = DataLoader(ds, 8, sampler=sampler, num_workers=4, drop_last=True)
    net = DDP(NowNet().cuda(), device_ids=[local_rank])
    opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
    for epoch in range(30):
        sampler.set_epoch(epoch)
        for past, future in loader:
            loss = (net(past.cuda()) - future.cuda()).pow(2).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0:
            torch.save(net.module.state_dict(), "nowcast.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
