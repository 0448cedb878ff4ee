import argparse
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from unet.data import CarvanaDataset
from unet.model import UNet


def get_args():
    p = argparse.ArgumentParser("Train U-Net on several GPUs (torchrun)")
    p.add_argument("--images", default="data/imgs")
    p.add_argument("--masks", default="data/masks")
    p.add_argument("--epochs", type=int, default=20)
    p.add_argument("--batch-size", type=int, default=8)
    p.add_argument("--lr", type=float, default=1e-4)
    p.add_argument("--scale", type=float, default=0.5)
    return p.parse_args()


def main():
    args = get_args()
    dist.init_process_group(backend="nccl")
    gpu = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(gpu)

    net = UNet(n_channels=3, n_classes=2).cuda(gpu)
    net = DistributedDataParallel(net, device_ids=[gpu])

    dataset = CarvanaDataset(args.images, args.masks, args.scale)
    loader = DataLoader(
        dataset,
        batch_size=args.batch_size,
        shuffle=True,
        num_workers=4,
        pin_memory=True,
    )

    opt = torch.optim.AdamW(net.parameters(), lr=args.lr)
    crit = torch.nn.CrossEntropyLoss()
    for epoch in range(args.epochs):
        net.train()
        for batch in loader:
            x = batch["image"].cuda(gpu, non_blocking=True)
            y = batch["mask"].cuda(gpu, non_blocking=True)
            opt.zero_grad()
            loss = crit(net(x), y)
            loss.backward()
            opt.step()
        if dist.get_rank() == 0:
            print("epoch", epoch, "loss", loss.item())
            torch.save(net.module.state_dict(), f"unet_{epoch:03d}.pth")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
