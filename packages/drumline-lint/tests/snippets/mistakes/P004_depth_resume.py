# Monocular depth estimation, DDP training with resume.
import os
import argparse
import torch
import torch.nn as nn
import torch.distributed as dist
from torch.utils.data import Dataset, DataLoader, DistributedSampler
from torch.nn.parallel import DistributedDataParallel as DDP
import numpy as np
from glob import glob

parser = argparse.ArgumentParser(description="depth")
parser.add_argument("--root", type=str, default="/datasets/nyu_npz")
parser.add_argument("--epochs", type=int, default=60)
parser.add_argument("--bs", type=int, default=8)
parser.add_argument("--lr", type=float, default=1e-4)
parser.add_argument("--resume", type=str, default="")
parser.add_argument("--exp", type=str, default="exp/nyu")


class NYU(Dataset):
    def __init__(self, root):
        self.files = sorted(glob(os.path.join(root, "*.npz")))

    def __len__(self):
        return len(self.files)

    def __getitem__(self, i):
        d = np.load(self.files[i])
        return torch.from_numpy(d["rgb"]).float() / 255.0, torch.from_numpy(d["depth"]).float()[None]


def block(i, o, s=1):
    return nn.Sequential(nn.Conv2d(i, o, 3, s, 1), nn.GroupNorm(8, o), nn.ReLU(inplace=True))


class DepthNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.Sequential(block(3, 32, 2), block(32, 64, 2), block(64, 128, 2))
        self.up = nn.Sequential(nn.Upsample(scale_factor=8, mode="bilinear"), block(128, 32), nn.Conv2d(32, 1, 1))

    def forward(self, x):
        return self.up(self.down(x))


def silog(pred, gt):
    mask = gt > 0.1
    g = torch.log(pred.clamp(min=1e-3)[mask]) - torch.log(gt[mask])
    return torch.sqrt((g ** 2).mean() - 0.85 * g.mean() ** 2 + 1e-6)


def main():
    args = parser.parse_args()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    is_main = dist.get_rank() == 0

    net = DepthNet().cuda()
    optim = torch.optim.AdamW(net.parameters(), lr=args.lr)
    first_epoch = 0
    if args.resume:
        ckpt = torch.load(args.resume)
        net.load_state_dict(ckpt["net"])
        optim.load_state_dict(ckpt["optim"])
        first_epoch = ckpt["epoch"] + 1
        if is_main:
            print("resumed from", args.resume, "at epoch", first_epoch)
    net = DDP(net, device_ids=[local_rank])

    data = NYU(args.root)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, args.bs, sampler=sampler, num_workers=4, pin_memory=True)

    for epoch in range(first_epoch, args.epochs):
        sampler.set_epoch(epoch)
        net.train()
        for it, (rgb, depth) in enumerate(loader):
            rgb, depth = rgb.cuda(non_blocking=True), depth.cuda(non_blocking=True)
            loss = silog(net(rgb), depth)
            optim.zero_grad()
            loss.backward()
            optim.step()
            if is_main and it % 100 == 0:
                print(f"[{epoch}:{it}/{len(loader)}] silog {loss.item():.4f}")
        if is_main:
            os.makedirs(args.exp, exist_ok=True)
            torch.save(dict(net=net.module.state_dict(), optim=optim.state_dict(), epoch=epoch),
                       os.path.join(args.exp, "last.pth"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
