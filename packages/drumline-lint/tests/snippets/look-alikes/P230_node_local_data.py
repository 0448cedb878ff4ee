import argparse
import os
import shutil
import tarfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import datasets, models, transforms


def stage(archive, scratch):
    """Unpack the dataset from the shared file system to the node's NVMe."""
    target = Path(scratch) / Path(archive).name.removesuffix(".tar")
    done = target.with_suffix(".done")
    if not done.exists():
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        with tarfile.open(archive) as tar:
            tar.extractall(target)
        done.touch()
    return target


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--archive", default="/shared/datasets/places.tar")
    ap.add_argument("--scratch", default="/local/nvme")
    ap.add_argument("--epochs", type=int, default=90)
    ap.add_argument("--bs", type=int, default=128)
    ap.add_argument("--out", default="/shared/runs/places.pt")
    args = ap.parse_args()

    rank = int(os.environ["RANK"])
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl", timeout=timedelta(hours=3))

    if local_rank == 0:
        stage(args.archive, args.scratch)
    dist.barrier()
    root = stage(args.archive, args.scratch)

    tf = transforms.Compose([transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip(),
                             transforms.ToTensor()])
    ds = datasets.ImageFolder(root / "train", tf)
    sampler = DistributedSampler(ds, shuffle=True)
    dl = DataLoader(ds, args.bs, sampler=sampler, num_workers=8, pin_memory=True, drop_last=True)
    model = DDP(models.resnet50(weights=None, num_classes=len(ds.classes)).cuda(), device_ids=[local_rank])
    opt = torch.optim.SGD(model.parameters(), lr=0.4, momentum=0.9, weight_decay=1e-4)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, args.epochs)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        total = torch.zeros((), device="cuda")
        for x, y in dl:
            loss = nn.functional.cross_entropy(model(x.cuda(non_blocking=True)), y.cuda(non_blocking=True))
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            total += loss.detach()
        sched.step()
        dist.all_reduce(total, op=dist.ReduceOp.AVG)
        if rank == 0:
            print(f"epoch {epoch} loss {total.item() / len(dl):.4f}", flush=True)
            torch.save(model.module.state_dict(), args.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
