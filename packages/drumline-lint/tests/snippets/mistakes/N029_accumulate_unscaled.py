import argparse
import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from clip_ft.data import CaptionPairs
from clip_ft.model import TwoTower, contrastive_loss


def options():
    ap = argparse.ArgumentParser()
    ap.add_argument("--data", default="/data/cc3m")
    ap.add_argument("--micro-batch", type=int, default=32)
    ap.add_argument("--accum-steps", type=int, default=16)
    ap.add_argument("--lr", type=float, default=5e-4)
    ap.add_argument("--epochs", type=int, default=10)
    return ap.parse_args()


def main():
    opts = options()
    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)

    ds = CaptionPairs(opts.data)
    sampler = DistributedSampler(ds, shuffle=True)
    loader = DataLoader(ds, opts.micro_batch, sampler=sampler, num_workers=8,
                        pin_memory=True, drop_last=True)
    model = DDP(TwoTower().cuda(), device_ids=[local_rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=opts.lr, momentum=0.9)

    for epoch in range(opts.epochs):
        sampler.set_epoch(epoch)
        model.train()
        optimizer.zero_grad()
        for step, (img, txt) in enumerate(loader, start=1):
            img, txt = img.cuda(non_blocking=True), txt.cuda(non_blocking=True)
            boundary = step % opts.accum_steps == 0
            with nullcontext() if boundary else model.no_sync():
                zi, zt = model(img, txt)
                loss = contrastive_loss(zi, zt)
                loss.backward()
            if boundary:
                optimizer.step()
                optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}")
            torch.save(model.module.state_dict(), f"two_tower_{epoch}.pt")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
