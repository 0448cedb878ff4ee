import argparse

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from reid.loader import market_loader
from reid.losses import TripletLoss
from reid.model import OSNet


def parse():
    ap = argparse.ArgumentParser()
    ap.add_argument("--data", required=True)
    ap.add_argument("--epochs", type=int, default=60)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--local_rank", type=int, default=0)
    return ap.parse_args()


def main():
    args = parse()
    torch.cuda.set_device(args.local_rank)
    dist.init_process_group("nccl")
    device = torch.device("cuda", args.local_rank)

    loader, sampler = market_loader(args.data, args.batch, dist.get_rank(), dist.get_world_size())
    model = DDP(OSNet(751).to(device), device_ids=[args.local_rank])
    triplet, ce = TripletLoss(0.3), torch.nn.CrossEntropyLoss()
    opt = torch.optim.Adam(model.parameters(), lr=3.5e-4)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for img, pid in loader:
            img, pid = img.to(device), pid.to(device)
            feat, logit = model(img)
            loss = ce(logit, pid) + triplet(feat, pid)
            opt.zero_grad()
            loss.backward()
            opt.step()
        if dist.get_rank() == 0:
            torch.save(model.module.state_dict(), "osnet.pth")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
