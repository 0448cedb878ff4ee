import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn

from data import train_loader
from engine import fit


def build():
    def block(i, o):
        return nn.Sequential(nn.Conv2d(i, o, 3, padding=1, bias=False),
                             nn.BatchNorm2d(o), nn.ReLU(), nn.MaxPool2d(2))
    return nn.Sequential(block(1, 32), block(32, 64), block(64, 128),
                         nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 35))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--root", required=True)
    ap.add_argument("--epochs", type=int, default=60)
    args = ap.parse_args()

    dist.init_process_group("nccl")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)

    loader = train_loader(args.root, 128)
    model = nn.parallel.DistributedDataParallel(build().to(device), device_ids=[device.index])
    opt = torch.optim.AdamW(model.parameters(), 1e-3)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, args.epochs)

    def on_epoch(epoch, loss):
        if dist.get_rank() == 0:
            print(epoch, round(loss, 4), flush=True)
            torch.save({"epoch": epoch, "model": model.module.state_dict()}, "kws.pt")

    fit(model, loader, opt, sched, args.epochs, device, on_epoch)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
