import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import models, transforms
from torchvision.datasets import EuroSAT


@torch.no_grad()
def evaluate(net, loader):
    net.eval()
    hit = n = 0
    for x, y in loader:
        hit += (net(x.cuda(non_blocking=True)).argmax(1).cpu() == y).sum().item()
        n += len(y)
    return hit / n


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--root", default="/data")
    ap.add_argument("--epochs", type=int, default=40)
    ap.add_argument("--bs", type=int, default=128)
    ap.add_argument("--out", default="eurosat.pt")
    args = ap.parse_args()

    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank = dist.get_rank()

    full = EuroSAT(args.root, transform=transforms.ToTensor())
    n_val = 2700
    train, val = torch.utils.data.random_split(
        full, [len(full) - n_val, n_val], generator=torch.Generator().manual_seed(20))
    sampler = DistributedSampler(train)
    train_dl = DataLoader(train, args.bs, sampler=sampler, num_workers=4, drop_last=True)
    val_dl = DataLoader(val, 256, num_workers=4) if rank == 0 else None

    model = DDP(models.resnet18(weights=None, num_classes=10).cuda(), device_ids=[local_rank])
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    best = 0.0

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in train_dl:
            loss = nn.functional.cross_entropy(model(x.cuda(non_blocking=True)), y.cuda(non_blocking=True))
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
        if rank == 0:
            acc = evaluate(model.module, val_dl)
            print(f"epoch {epoch} val acc {acc:.4f}", flush=True)
            if acc > best:
                best = acc
                torch.save(model.module.state_dict(), args.out)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
