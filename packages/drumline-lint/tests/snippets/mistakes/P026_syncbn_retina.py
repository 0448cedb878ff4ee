import argparse
import os
import random

import numpy as np
import torch
import torch.distributed as dist
import torchvision
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import transforms


def setup_seed(seed):
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def build_model(args, local_rank):
    model = torchvision.models.efficientnet_b3(weights=None)
    model.classifier[1] = nn.Linear(model.classifier[1].in_features, args.grades)
    model = model.cuda(local_rank)
    model = nn.parallel.DistributedDataParallel(model, device_ids=[local_rank], output_device=local_rank)
    if args.sync_bn:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    return model


def build_data(args):
    norm = transforms.Normalize([0.42, 0.22, 0.07], [0.28, 0.15, 0.08])
    train_tf = transforms.Compose([transforms.RandomAffine(180, scale=(0.9, 1.1)), transforms.Resize((448, 448)),
                                   transforms.ToTensor(), norm])
    train = torchvision.datasets.ImageFolder(os.path.join(args.data, "train"), train_tf)
    sampler = DistributedSampler(train, shuffle=True, drop_last=True)
    loader = DataLoader(train, args.batch_size, sampler=sampler, num_workers=args.workers,
                        pin_memory=True, drop_last=True, persistent_workers=True)
    return loader, sampler


class Meter:
    def __init__(self, device):
        self.buf = torch.zeros(3, device=device)

    def add(self, loss, logits, y):
        self.buf += torch.stack([loss.detach() * len(y), (logits.argmax(1) == y).sum().float(),
                                 torch.tensor(float(len(y)), device=y.device)])

    def reduced(self):
        dist.all_reduce(self.buf)
        s, c, n = self.buf.tolist()
        return s / n, c / n


def main():
    ap = argparse.ArgumentParser("retinopathy grading")
    ap.add_argument("--data", default="/data/eyepacs")
    ap.add_argument("--grades", type=int, default=5)
    ap.add_argument("--batch-size", type=int, default=10)
    ap.add_argument("--workers", type=int, default=6)
    ap.add_argument("--epochs", type=int, default=40)
    ap.add_argument("--lr", type=float, default=2e-4)
    ap.add_argument("--sync-bn", action="store_true", default=True)
    ap.add_argument("--out", default="retina.pt")
    args = ap.parse_args()

    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    setup_seed(2024 + rank)

    loader, sampler = build_data(args)
    model = build_model(args, local_rank)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, args.lr, total_steps=args.epochs * len(loader))
    ce = nn.CrossEntropyLoss()

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        meter = Meter(torch.device("cuda", local_rank))
        for x, y in loader:
            x, y = x.cuda(non_blocking=True), y.cuda(non_blocking=True)
            logits = model(x)
            loss = ce(logits, y)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            sched.step()
            meter.add(loss, logits, y)
        loss_avg, acc = meter.reduced()
        if rank == 0:
            print(f"epoch {epoch:02d}  loss {loss_avg:.4f}  acc {acc:.4f}")
            torch.save(model.module.state_dict(), args.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
