import argparse

import torch
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

import comm
from loaders import make_train_loader
from unet import UNet


def train_epoch(model, loader, optimizer, device, loss_fn):
    model.train()
    total = torch.zeros(2, device=device)
    for image, mask in loader:
        image, mask = image.to(device), mask.to(device)
        optimizer.zero_grad()
        loss = loss_fn(model(image), mask)
        loss.backward()
        optimizer.step()
        total += torch.tensor([loss.item() * image.size(0), image.size(0)], device=device)
    comm.sum_(total)
    return (total[0] / total[1]).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", required=True)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--bs", type=int, default=8)
    cfg = parser.parse_args()

    device = comm.init()
    torch.manual_seed(7 + comm.rank())
    loader = make_train_loader(cfg.root, cfg.bs)
    model = DDP(UNet(3, 19).to(device), device_ids=[device.index])
    optimizer = torch.optim.Adam(model.parameters(), 1e-4)
    loss_fn = nn.CrossEntropyLoss(ignore_index=255)
    for epoch in range(cfg.epochs):
        avg = train_epoch(model, loader, optimizer, device, loss_fn)
        if comm.rank() == 0:
            print(f"[{epoch}] loss {avg:.4f}")
            torch.save(model.module.state_dict(), "unet.pt")
    comm.finish()


if __name__ == "__main__":
    main()
