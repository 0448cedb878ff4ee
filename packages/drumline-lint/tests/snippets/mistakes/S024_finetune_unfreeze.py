"""Two-phase fine-tuning: head first, then the full backbone.

$ torchrun --nproc_per_node=4 finetune_unfreeze.py --data /data/inat_mini
"""
import argparse
import os

import timm
import torch
import torch.distributed as dist
from timm.data import create_transform, resolve_data_config
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from torchvision.datasets import ImageFolder


def build(name, n_classes):
    net = timm.create_model(name, pretrained=True, num_classes=n_classes)
    for p in net.parameters():
        p.requires_grad_(False)
    for p in net.get_classifier().parameters():
        p.requires_grad_(True)
    return net


def train_epoch(model, loader, opt, epoch):
    loader.sampler.set_epoch(epoch)
    model.train()
    for x, y in loader:
        x, y = x.cuda(non_blocking=True), y.cuda(non_blocking=True)
        loss = nn.functional.cross_entropy(model(x), y, label_smoothing=0.05)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()


@torch.no_grad()
def top1(model, loader):
    model.eval()
    acc = torch.zeros(2, device="cuda")
    for x, y in loader:
        acc[0] += (model(x.cuda()).argmax(1) == y.cuda()).sum()
        acc[1] += y.numel()
    dist.all_reduce(acc)
    return (acc[0] / acc[1]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--data", required=True)
    ap.add_argument("--arch", default="convnext_tiny")
    ap.add_argument("--head-epochs", type=int, default=5)
    ap.add_argument("--epochs", type=int, default=30)
    args = ap.parse_args()

    dist.init_process_group("nccl")
    gpu = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(gpu)

    net = build(args.arch, len(os.listdir(os.path.join(args.data, "train"))))
    conf = resolve_data_config({}, model=net)
    train = ImageFolder(f"{args.data}/train", create_transform(**conf, is_training=True))
    val = ImageFolder(f"{args.data}/val", create_transform(**conf))
    train_loader = DataLoader(train, 64, sampler=DistributedSampler(train), num_workers=8, drop_last=True)
    val_loader = DataLoader(val, 128, sampler=DistributedSampler(val, shuffle=False), num_workers=8)

    model = DistributedDataParallel(net.cuda(), device_ids=[gpu])
    opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)

    for epoch in range(args.epochs):
        if epoch == args.head_epochs:
            for p in model.parameters():
                p.requires_grad_(True)
            opt = torch.optim.AdamW(model.parameters(), lr=5e-5, weight_decay=0.05)
        train_epoch(model, train_loader, opt, epoch)
        acc = top1(model, val_loader)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {acc:.4f}")
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), "finetuned.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
