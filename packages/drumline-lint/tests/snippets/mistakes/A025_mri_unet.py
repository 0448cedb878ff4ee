import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.amp import GradScaler, autocast
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Slices(Dataset):
    def __init__(self, path):
        blob = torch.load(path, map_location="cpu", weights_only=True)
        self.img, self.seg = blob["img"], blob["seg"]

    def __len__(self):
        return len(self.img)

    def __getitem__(self, i):
        return self.img[i].float(), self.seg[i].long()


class SmallUNet(nn.Module):
    def __init__(self, classes=4):
        super().__init__()
        self.a = nn.Sequential(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU())
        self.b = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.Upsample(scale_factor=2))
        self.c = nn.Conv2d(96, classes, 1)

    def forward(self, x):
        a = self.a(x)
        return self.c(torch.cat([a, self.b(a)], dim=1))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--data", default="mri.pt")
    ap.add_argument("--clip", type=float, default=1.0)
    ap.add_argument("--epochs", type=int, default=50)
    args = ap.parse_args()
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    torch.manual_seed(dist.get_rank())

    ds = Slices(args.data)
    sampler = DistributedSampler(ds, drop_last=True)
    loader = DataLoader(ds, 16, sampler=sampler, num_workers=4, drop_last=True)
    model = DDP(SmallUNet().to(device), device_ids=[local_rank])
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-5, momentum=0.99)
    scaler = GradScaler("cuda")
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for img, seg in loader:
            optimizer.zero_grad(set_to_none=True)
            with autocast("cuda", dtype=torch.float16):
                loss = nn.functional.cross_entropy(model(img.to(device)), seg.to(device))
            scaler.scale(loss).backward()
            nn.utils.clip_grad_norm_(model.parameters(), args.clip)
            scaler.step(optimizer)
            scaler.update()
        if dist.get_rank() == 0:
            torch.save(model.module.state_dict(), "mri_unet.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
