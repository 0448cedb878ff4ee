import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, DistributedSampler, Subset
from torchvision import datasets, models, transforms


def loaders(args, rank, world):
    norm = transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
    train = datasets.ImageFolder(f"{args.data}/train", transforms.Compose(
        [transforms.RandomResizedCrop(224), transforms.TrivialAugmentWide(), transforms.ToTensor(), norm]))
    val = datasets.ImageFolder(f"{args.data}/val", transforms.Compose(
        [transforms.Resize(256), transforms.CenterCrop(224), transforms.ToTensor(), norm]))
    sampler = DistributedSampler(train)
    return (DataLoader(train, args.bs, sampler=sampler, num_workers=8, pin_memory=True, drop_last=True), sampler,
            DataLoader(Subset(val, range(rank, len(val), world)), args.bs, num_workers=4))


@torch.no_grad()
def top1(net, dl):
    net.eval()
    s = torch.zeros(2, device="cuda")
    for x, y in dl:
        s[0] += (net(x.cuda()).argmax(1) == y.cuda()).sum()
        s[1] += len(y)
    dist.all_reduce(s)
    return (s[0] / s[1]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--data", default="/data/imagenet")
    ap.add_argument("--epochs", type=int, default=120)
    ap.add_argument("--bs", type=int, default=128)
    ap.add_argument("--lr", type=float, default=0.5)
    ap.add_argument("--ema-decay", type=float, default=0.9998)
    ap.add_argument("--out", default="ema.pt")
    args = ap.parse_args()

    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    train_dl, sampler, val_dl = loaders(args, rank, world)

    net = models.regnet_y_3_2gf(weights=None)
    net = nn.SyncBatchNorm.convert_sync_batchnorm(net).cuda()
    model = DDP(net, device_ids=[local_rank])
    ema = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(args.ema_decay), use_buffers=True)
    opt = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=5e-5)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, args.epochs)
    ce = nn.CrossEntropyLoss(label_smoothing=0.1)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in train_dl:
            loss = ce(model(x.cuda(non_blocking=True)), y.cuda(non_blocking=True))
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            ema.update_parameters(net)
        sched.step()
        acc = top1(ema, val_dl)
        if rank == 0:
            print(f"epoch {epoch}: ema top-1 {acc:.4f}", flush=True)
            torch.save({"net": net.state_dict(), "ema": ema.module.state_dict()}, args.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
