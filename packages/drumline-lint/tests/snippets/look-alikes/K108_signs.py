import argparse
import os

import torch
import torch.distributed as dist
import torchvision
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import transforms as T


def get_args():
    p = argparse.ArgumentParser()
    p.add_argument("--root", default="/data/gtsrb/train")
    p.add_argument("--epochs", type=int, default=25)
    p.add_argument("--batch-size", type=int, default=256)
    p.add_argument("--local_rank", "--local-rank", type=int,
                   default=int(os.environ.get("LOCAL_RANK", 0)))
    return p.parse_args()


def main():
    args = get_args()
    torch.cuda.set_device(args.local_rank)
    dist.init_process_group("nccl")
    tf = T.Compose([T.Resize((48, 48)), T.ColorJitter(0.3, 0.3), T.ToTensor()])
    ds = torchvision.datasets.ImageFolder(args.root, tf)
    sampler = DistributedSampler(ds, drop_last=True)
    loader = DataLoader(ds, args.batch_size, sampler=sampler, num_workers=4, drop_last=True)
    net = nn.Sequential(nn.Conv2d(3, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(64, 128, 3),
                        nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(),
                        nn.Linear(2048, len(ds.classes)))
    net = DDP(net.cuda(), device_ids=[args.local_rank])
    opt = torch.optim.AdamW(net.parameters(), lr=2e-3)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.cross_entropy(net(x.cuda()), y.cuda())
            opt.zero_grad()
            loss.backward()
            opt.step()
    if dist.get_rank() == 0:
        torch.save(net.module.state_dict(), "signs.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
