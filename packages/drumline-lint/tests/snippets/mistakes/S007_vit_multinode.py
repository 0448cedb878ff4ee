r"""ViT-B/16 on ImageNet over two nodes with 8 GPUs each.

On each node:
    torchrun --nnodes=2 --nproc_per_node=8 --rdzv_backend=c10d \
        --rdzv_endpoint=$HEAD:29400 vit_multinode.py --data /imagenet
"""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchvision import datasets, transforms as T
from torchvision.models import vit_b_16


def loaders(root, bs):
    norm = T.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
    train = datasets.ImageFolder(f"{root}/train", T.Compose([
        T.RandomResizedCrop(224), T.RandomHorizontalFlip(), T.RandAugment(), T.ToTensor(), norm]))
    val = datasets.ImageFolder(f"{root}/val", T.Compose([
        T.Resize(256), T.CenterCrop(224), T.ToTensor(), norm]))
    ts, vs = DistributedSampler(train), DistributedSampler(val, shuffle=False)
    kw = dict(num_workers=8, pin_memory=True, persistent_workers=True)
    return DataLoader(train, bs, sampler=ts, drop_last=True, **kw), DataLoader(val, bs, sampler=vs, **kw), ts


@torch.no_grad()
def accuracy(model, loader, device):
    model.eval()
    c = torch.zeros(2, device=device)
    for x, y in loader:
        x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
        c[0] += (model(x).argmax(1) == y).sum()
        c[1] += len(y)
    dist.all_reduce(c)
    return (c[0] / c[1]).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--epochs", type=int, default=90)
    args = parser.parse_args()

    dist.init_process_group(backend="nccl", init_method="env://")
    rank = dist.get_rank()
    device = torch.device(f"cuda:{rank}")
    torch.cuda.set_device(device)

    train_loader, val_loader, sampler = loaders(args.data, args.batch_size)
    model = vit_b_16(weights=None).to(device)
    model = DistributedDataParallel(model, device_ids=[rank])
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in train_loader:
            x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
        scheduler.step()
        acc = accuracy(model, val_loader, device)
        if rank == 0:
            print(f"epoch {epoch}: top1 {acc:.4f}")
            torch.save(model.module.state_dict(), "vit_b16.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
