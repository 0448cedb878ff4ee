import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class HeatmapNet(nn.Module):
    def __init__(self, joints=17):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 64, 7, 2, 3), nn.ReLU(), nn.Conv2d(64, 256, 3, 2, 1), nn.ReLU())
        self.head = nn.Conv2d(256, joints, 1)

    def forward(self, x):
        return self.head(self.stem(x))


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--resume", default="")
    p.add_argument("--epochs", type=int, default=140)
    p.add_argument("--data", default="/data/coco_pose.pt")
    return p.parse_args()


def main():
    args = parse()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    blob = torch.load(args.data, map_location="cpu")
    ds = TensorDataset(blob["crop"], blob["heat"])
    sampler = DistributedSampler(ds, drop_last=True)
    loader = DataLoader(ds, batch_size=64, sampler=sampler, num_workers=8, drop_last=True)

    model = HeatmapNet().cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-4)
    start = 0
    if args.resume:
        ck = torch.load(args.resume)
        model.load_state_dict(ck["model"])
        optimizer.load_state_dict(ck["optimizer"])
        start = ck["epoch"] + 1
    model = DDP(model, device_ids=[local_rank])

    for epoch in range(start, args.epochs):
        sampler.set_epoch(epoch)
        for crop, heat in loader:
            loss = nn.functional.mse_loss(model(crop.cuda()), heat.cuda())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict(),
                        "epoch": epoch}, "pose_last.pth")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
