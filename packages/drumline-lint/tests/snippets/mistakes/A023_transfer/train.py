import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from data import birds
from env import init_env
from net import BirdNet


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", default="/data/birds")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--unfreeze-at", type=int, default=5)
    opt = parser.parse_args()

    device = init_env(seed=4)
    loader, sampler = birds(opt.root, 64)
    model = BirdNet(classes=200)
    model.freeze_backbone()
    model = DDP(model.to(device), device_ids=[device.index])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    for epoch in range(opt.epochs):
        if epoch == opt.unfreeze_at:
            model.module.unfreeze_backbone()
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            loss = F.cross_entropy(model(x.to(device)), y.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), "birdnet.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
