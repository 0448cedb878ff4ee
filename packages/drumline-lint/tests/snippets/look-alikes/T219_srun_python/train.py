import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Volumes(Dataset):
    def __init__(self, root):
        self.files = sorted(Path(root).glob("*.pt"))

    def __len__(self):
        return len(self.files)

    def __getitem__(self, i):
        case = torch.load(self.files[i], map_location="cpu")
        return case["image"].float(), case["seg"].long()


def conv(i, o, s=1):
    return nn.Sequential(nn.Conv3d(i, o, 3, s, 1), nn.InstanceNorm3d(o), nn.LeakyReLU(inplace=True))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = conv(4, 32), conv(32, 64, 2), conv(64, 128, 2)
        self.up1, self.up2 = nn.ConvTranspose3d(128, 64, 2, 2), nn.ConvTranspose3d(64, 32, 2, 2)
        self.out = nn.Conv3d(32, 4, 1)

    def forward(self, x):
        a = self.a(x)
        b = self.b(a)
        return self.out(self.up2(self.up1(self.c(b)) + b) + a)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--data", required=True)
    ap.add_argument("--epochs", type=int, default=200)
    args = ap.parse_args()
    rank, local = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_LOCALID"])
    world = int(os.environ["SLURM_NTASKS"])
    torch.cuda.set_device(local)
    dist.init_process_group("nccl", rank=rank, world_size=world)

    ds = Volumes(args.data)
    sampler = DistributedSampler(ds)
    loader = DataLoader(ds, 1, sampler=sampler, num_workers=4)
    model = DDP(Net().cuda(), device_ids=[local])
    opt = torch.optim.SGD(model.parameters(), 0.01, momentum=0.99, nesterov=True)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.cross_entropy(model(x.cuda()), y.cuda())
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0:
            print(epoch, loss.item(), flush=True)
            torch.save(model.module.state_dict(), "unet3d.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
