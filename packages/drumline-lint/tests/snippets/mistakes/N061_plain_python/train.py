import argparse
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from pose.data import build_loader
from pose.net import HRNet


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--data")
    ap.add_argument("--batch-size", type=int)
    ap.add_argument("--epochs", type=int)
    args = ap.parse_args()

    rank = int(os.environ["RANK"])
    local_rank = int(os.environ["LOCAL_RANK"])
    world_size = int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl", rank=rank, world_size=world_size)

    loader, sampler = build_loader(args.data, args.batch_size, rank, world_size)
    model = DDP(HRNet().cuda(), device_ids=[local_rank])
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, heat in loader:
            loss = ((model(x.cuda()) - heat.cuda()) ** 2).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0:
            torch.save(model.module.state_dict(), "hrnet.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
