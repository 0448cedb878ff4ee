import argparse
import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import datasets, transforms
from torchvision.models import swin_t


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--data", default="/data/inat/train")
    ap.add_argument("--epochs", type=int, default=100)
    ap.add_argument("--micro", type=int, default=32)
    ap.add_argument("--accum", type=int, default=4)
    ap.add_argument("--lr", type=float, default=5e-4)
    ap.add_argument("--out", default="swin.pt")
    args = ap.parse_args()

    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    torch.manual_seed(rank)

    tf = transforms.Compose([transforms.RandomResizedCrop(224), transforms.RandAugment(), transforms.ToTensor()])
    ds = datasets.ImageFolder(args.data, tf)
    sampler = DistributedSampler(ds)
    dl = DataLoader(ds, args.micro, sampler=sampler, num_workers=8, pin_memory=True, drop_last=True)

    model = DDP(swin_t(weights=None, num_classes=len(ds.classes)).cuda(), device_ids=[local_rank])
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.05)
    scaler = torch.amp.GradScaler("cuda")

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        n = len(dl)
        tail = n % args.accum
        for i, (x, y) in enumerate(dl):
            last = (i + 1) % args.accum == 0 or i + 1 == n
            window = tail if tail and i >= n - tail else args.accum
            x, y = x.cuda(non_blocking=True), y.cuda(non_blocking=True)
            with nullcontext() if last else model.no_sync():
                with torch.autocast("cuda", torch.float16):
                    loss = F.cross_entropy(model(x), y, label_smoothing=0.1) / window
                scaler.scale(loss).backward()
            if last:
                scaler.unscale_(opt)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
                scaler.step(opt)
                scaler.update()
                opt.zero_grad(set_to_none=True)
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item() * window:.4f}", flush=True)
            torch.save(model.module.state_dict(), args.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
