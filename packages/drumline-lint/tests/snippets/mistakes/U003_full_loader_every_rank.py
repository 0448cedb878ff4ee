import os
import torch
import torch.multiprocessing as mp
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader

from unet import UNet
from dataset import CarvanaDataset


def setup(rank, world_size):
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = "12355"
    dist.init_process_group("nccl", rank=rank, world_size=world_size)
    torch.cuda.set_device(rank)


def train(rank, world_size, cfg):
    setup(rank, world_size)

    train_ds = CarvanaDataset(cfg["img_dir"], cfg["mask_dir"], scale=0.5)
    train_loader = DataLoader(
        train_ds,
        batch_size=cfg["batch_size"],
        shuffle=True,
        num_workers=4,
        pin_memory=True,
        drop_last=True,
    )

    net = UNet(n_channels=3, n_classes=1).to(rank)
    net = DDP(net, device_ids=[rank])
    criterion = nn.BCEWithLogitsLoss()
    optimizer = torch.optim.RMSprop(net.parameters(), lr=cfg["lr"], weight_decay=1e-8)

    for epoch in range(cfg["epochs"]):
        net.train()
        epoch_loss = 0.0
        for imgs, masks in train_loader:
            imgs = imgs.to(rank, non_blocking=True)
            masks = masks.to(rank, non_blocking=True)
            pred = net(imgs)
            loss = criterion(pred, masks)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            epoch_loss += loss.item()
        if rank == 0:
            print(f"epoch {epoch + 1}: {epoch_loss / len(train_loader):.5f}")
            torch.save(net.module.state_dict(), f"checkpoints/cp_{epoch + 1}.pth")

    dist.destroy_process_group()


if __name__ == "__main__":
    n_gpus = torch.cuda.device_count()
    config = dict(img_dir="data/imgs", mask_dir="data/masks", batch_size=8, lr=1e-4, epochs=40)
    mp.spawn(train, args=(n_gpus, config), nprocs=n_gpus, join=True)
