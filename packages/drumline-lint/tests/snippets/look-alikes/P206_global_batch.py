import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import datasets, models, transforms


def reduce_mean(t):
    t = t.detach().clone()
    dist.all_reduce(t, op=dist.ReduceOp.SUM)
    return t.div_(dist.get_world_size())


def lr_for(batch_size, base=0.1):
    return base * batch_size / 256


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--data", default="/data/imagenet")
    ap.add_argument("--batch-size", type=int, default=1024, help="over all GPUs")
    ap.add_argument("--epochs", type=int, default=90)
    ap.add_argument("--warmup", type=int, default=5)
    ap.add_argument("--out", default="r50.pt")
    args = ap.parse_args()

    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()

    if args.batch_size % world:
        raise SystemExit(f"--batch-size {args.batch_size} is not divisible by {world} processes")
    per_gpu = args.batch_size // world

    tf = transforms.Compose([transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip(),
                             transforms.ToTensor()])
    ds = datasets.ImageFolder(os.path.join(args.data, "train"), tf)
    sampler = DistributedSampler(ds, shuffle=True)
    dl = DataLoader(ds, per_gpu, sampler=sampler, num_workers=8, pin_memory=True, drop_last=True)

    model = DDP(models.resnet50(weights=None).cuda(), device_ids=[local_rank])
    opt = torch.optim.SGD(model.parameters(), lr=lr_for(args.batch_size), momentum=0.9, weight_decay=5e-5)
    warm = torch.optim.lr_scheduler.LinearLR(opt, 0.01, total_iters=args.warmup)
    cos = torch.optim.lr_scheduler.CosineAnnealingLR(opt, args.epochs - args.warmup)
    sched = torch.optim.lr_scheduler.SequentialLR(opt, [warm, cos], [args.warmup])

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for i, (x, y) in enumerate(dl):
            x, y = x.cuda(non_blocking=True), y.cuda(non_blocking=True)
            loss = F.cross_entropy(model(x), y)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            if i % 100 == 0:
                mean = reduce_mean(loss)
                if rank == 0:
                    print(f"[{epoch}] {i}/{len(dl)} loss {mean.item():.4f} lr {opt.param_groups[0]['lr']:.4f}")
        sched.step()
        if rank == 0:
            torch.save(model.module.state_dict(), args.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
