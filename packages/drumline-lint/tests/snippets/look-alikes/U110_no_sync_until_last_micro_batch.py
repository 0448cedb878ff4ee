import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from transformers import ViTForImageClassification

from herbarium.data import HerbariumSheets

ACCUM = 6


def run_epoch(model, loader, optimizer, scheduler):
    n = len(loader)
    tail = n % ACCUM
    for i, (pixels, labels) in enumerate(loader):
        boundary = (i + 1) % ACCUM == 0 or i + 1 == n
        group = tail if tail and i >= n - tail else ACCUM
        with nullcontext() if boundary else model.no_sync():
            with torch.autocast("cuda", dtype=torch.bfloat16):
                out = model(pixel_values=pixels.cuda(non_blocking=True),
                            labels=labels.cuda(non_blocking=True))
            (out.loss / group).backward()
        if not boundary:
            continue
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad(set_to_none=True)


def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")

    ds = HerbariumSheets("/data/herbarium", "train")
    sampler = DistributedSampler(ds, drop_last=True)
    loader = DataLoader(ds, 16, sampler=sampler, num_workers=8, pin_memory=True, drop_last=True)
    net = ViTForImageClassification.from_pretrained(
        "google/vit-large-patch16-224-in21k", num_labels=len(ds.classes))
    model = DistributedDataParallel(net.cuda(), device_ids=[torch.cuda.current_device()])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-5, weight_decay=0.05)
    updates = 10 * -(-len(loader) // ACCUM)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, updates)

    for epoch in range(10):
        sampler.set_epoch(epoch)
        model.train()
        run_epoch(model, loader, optimizer, scheduler)
        if dist.get_rank() == 0:
            model.module.save_pretrained(f"out/herbarium/{epoch}")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
