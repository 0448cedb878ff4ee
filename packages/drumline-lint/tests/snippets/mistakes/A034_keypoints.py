import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Poses(Dataset):
    def __init__(self, path):
        blob = torch.load(path, map_location="cpu", weights_only=True)
        self.images, self.maps = blob["images"], blob["heatmaps"]

    def __len__(self):
        return self.images.size(0)

    def __getitem__(self, k):
        return self.images[k].float().div(255), self.maps[k]


class HeatmapNet(nn.Module):
    def __init__(self, joints=17):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 64, 7, 2, 3), nn.ReLU(), nn.Conv2d(64, 64, 3, 2, 1), nn.ReLU(),
                                 nn.Conv2d(64, joints, 1))

    def forward(self, x):
        return self.net(x)


def save_checkpoint(path, model, optimizer, epoch):
    torch.save({
        "epoch": epoch,
        "model": model.module.state_dict(),
        "optimizer": optimizer.state_dict(),
    }, path)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--train", default="poses.pt")
    ap.add_argument("--ckpt", default="pose_last.pt")
    ap.add_argument("--epochs", type=int, default=140)
    args = ap.parse_args()
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group(backend="nccl")
    torch.manual_seed(3 + dist.get_rank())

    ds = Poses(args.train)
    sampler = DistributedSampler(ds, shuffle=True, drop_last=True)
    loader = DataLoader(ds, 32, sampler=sampler, num_workers=4, drop_last=True)
    model = DDP(HeatmapNet().to(device), device_ids=[local_rank], output_device=local_rank)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for img, target in loader:
            loss = nn.functional.mse_loss(model(img.to(device)), target.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        save_checkpoint(args.ckpt, model, optimizer, epoch)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
