import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import wandb
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import models, transforms
from torchvision.datasets import StanfordCars


def setup_logging(args, rank):
    return wandb.init(
        project="cars",
        name=args.name,
        config=vars(args),
        mode="online" if rank == 0 else "disabled",
    )


def mean_over_ranks(x):
    x = x.detach().clone()
    dist.all_reduce(x, op=dist.ReduceOp.AVG)
    return x.item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--name", default="baseline")
    ap.add_argument("--root", default="/data")
    ap.add_argument("--epochs", type=int, default=60)
    ap.add_argument("--bs", type=int, default=32)
    ap.add_argument("--lr", type=float, default=0.01)
    ap.add_argument("--log-every", type=int, default=20)
    args = ap.parse_args()

    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    run = setup_logging(args, rank)

    tf = transforms.Compose([transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip(),
                             transforms.ToTensor()])
    ds = StanfordCars(args.root, split="train", transform=tf)
    sampler = DistributedSampler(ds)
    dl = DataLoader(ds, args.bs, sampler=sampler, num_workers=4, drop_last=True)
    model = DDP(models.resnet50(weights=None, num_classes=196).cuda(), device_ids=[local_rank])
    opt = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, nesterov=True)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, args.epochs * len(dl))

    step = 0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in dl:
            loss = nn.functional.cross_entropy(model(x.cuda(non_blocking=True)), y.cuda(non_blocking=True))
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            sched.step()
            step += 1
            if step % args.log_every == 0:
                value = mean_over_ranks(loss)
                wandb.log({"train/loss": value, "lr": sched.get_last_lr()[0], "epoch": epoch}, step=step)
        if rank == 0:
            torch.save(model.module.state_dict(), f"cars_{args.name}.pt")

    run.finish()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
