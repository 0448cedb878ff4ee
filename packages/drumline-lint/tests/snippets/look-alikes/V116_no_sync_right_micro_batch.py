import contextlib
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from detection.data import ObjectsDataset, collate_boxes
from detection.model import DETR, set_loss

ACCUM = 4


def train_epoch(model, loader, optimizer, scaler):
    model.train()
    total = torch.zeros((), device="cuda")
    last = len(loader) - 1
    for i, (images, targets) in enumerate(loader):
        images = images.cuda(non_blocking=True)
        update = i % ACCUM == ACCUM - 1 or i == last
        with model.no_sync() if not update else contextlib.nullcontext():
            with torch.autocast("cuda", dtype=torch.float16):
                loss = set_loss(model(images), targets) / ACCUM
            scaler.scale(loss).backward()
        if update:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
        total += loss.detach()
    return total * ACCUM / len(loader)


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    dataset = ObjectsDataset("/data/objects365")
    sampler = DistributedSampler(dataset, drop_last=True)
    loader = DataLoader(dataset, 2, sampler=sampler, collate_fn=collate_boxes, num_workers=4, drop_last=True)
    model = DDP(DETR(queries=300).cuda(), device_ids=[local_rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=1e-4)
    scaler = torch.cuda.amp.GradScaler()
    for epoch in range(50):
        sampler.set_epoch(epoch)
        loss = train_epoch(model, loader, optimizer, scaler)
        dist.all_reduce(loss, op=dist.ReduceOp.AVG)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {loss.item():.4f}")
            torch.save(model.module.state_dict(), "detr.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
