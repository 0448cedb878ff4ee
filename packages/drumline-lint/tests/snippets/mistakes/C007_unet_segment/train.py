import argparse
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from scans import ScanDataset
from unet import UNet


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True)
    parser.add_argument("--epochs", type=int, default=50)
    args = parser.parse_args()

    rank = int(os.environ["RANK"])
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")

    net = DDP(UNet(in_channels=1, classes=4).cuda(), device_ids=[local_rank])
    opt = torch.optim.AdamW(net.parameters(), lr=3e-4)
    train_set = ScanDataset(args.data)
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=8, sampler=sampler, num_workers=8, pin_memory=True)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for image, mask in loader:
            opt.zero_grad(set_to_none=True)
            out = net(image.cuda(non_blocking=True))
            torch.nn.functional.cross_entropy(out, mask.cuda(non_blocking=True)).backward()
            opt.step()
        if rank == 0:
            torch.save(net.module.state_dict(), f"unet_{epoch:03d}.pt")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
