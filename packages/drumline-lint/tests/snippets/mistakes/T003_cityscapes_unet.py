import argparse
import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from torchvision.datasets import Cityscapes
from torchvision.transforms import functional as TF


def double_conv(cin, cout):
    return nn.Sequential(
        nn.Conv2d(cin, cout, 3, padding=1), nn.BatchNorm2d(cout), nn.ReLU(inplace=True),
        nn.Conv2d(cout, cout, 3, padding=1), nn.BatchNorm2d(cout), nn.ReLU(inplace=True),
    )


class UNet(nn.Module):
    def __init__(self, classes=20, w=32):
        super().__init__()
        self.d1, self.d2, self.d3 = double_conv(3, w), double_conv(w, 2 * w), double_conv(2 * w, 4 * w)
        self.u2 = double_conv(6 * w, 2 * w)
        self.u1 = double_conv(3 * w, w)
        self.out = nn.Conv2d(w, classes, 1)

    def forward(self, x):
        a = self.d1(x)
        b = self.d2(F.max_pool2d(a, 2))
        c = self.d3(F.max_pool2d(b, 2))
        b = self.u2(torch.cat([b, F.interpolate(c, scale_factor=2)], 1))
        a = self.u1(torch.cat([a, F.interpolate(b, scale_factor=2)], 1))
        return self.out(a)


def prepare(img, mask):
    img = TF.to_tensor(TF.resize(img, [256, 512]))
    mask = TF.pil_to_tensor(TF.resize(mask, [256, 512], interpolation=TF.InterpolationMode.NEAREST))[0].long()
    mask[mask > 19] = 19
    return img, mask


def worker(rank, world_size, args):
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29511")
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=world_size)

    dataset = Cityscapes(args.root, split="train", mode="fine", target_type="semantic", transforms=prepare)
    sampler = DistributedSampler(dataset, world_size, rank, shuffle=True)
    loader = DataLoader(dataset, args.batch, sampler=sampler, num_workers=6, drop_last=True)

    net = nn.SyncBatchNorm.convert_sync_batchnorm(UNet()).cuda(rank)
    net = DDP(net, device_ids=[rank])
    opt = torch.optim.AdamW(net.parameters(), lr=args.lr)
    sched = torch.optim.lr_scheduler.PolynomialLR(opt, args.epochs, power=0.9)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        net.train()
        running = 0.0
        for img, mask in loader:
            img, mask = img.cuda(rank, non_blocking=True), mask.cuda(rank, non_blocking=True)
            loss = F.cross_entropy(net(img), mask, ignore_index=19)
            opt.zero_grad()
            loss.backward()
            opt.step()
            running += loss.item()
        sched.step()
        if rank == 0:
            print(f"[{epoch}] loss={running / len(loader):.4f} lr={sched.get_last_lr()[0]:.2e}")

        state = {"net": net.module.state_dict(), "opt": opt.state_dict(), "epoch": epoch}
        torch.save(state, os.path.join(args.save_dir, "last.pth"))

    dist.destroy_process_group()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--root", default="/data/cityscapes")
    ap.add_argument("--save_dir", default="runs/unet")
    ap.add_argument("--batch", type=int, default=4)
    ap.add_argument("--epochs", type=int, default=120)
    ap.add_argument("--lr", type=float, default=6e-4)
    args = ap.parse_args()
    os.makedirs(args.save_dir, exist_ok=True)
    n = torch.cuda.device_count()
    mp.spawn(worker, args=(n, args), nprocs=n, join=True)


if __name__ == "__main__":
    main()
