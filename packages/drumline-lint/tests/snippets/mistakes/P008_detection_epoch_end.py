import argparse
import os
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from torchvision.datasets import CocoDetection
from torchvision.models.detection import fasterrcnn_resnet50_fpn
from torchvision.transforms.functional import to_tensor


def to_target(anns):
    boxes, labels = [], []
    for a in anns:
        x, y, w, h = a["bbox"]
        if w > 1 and h > 1:
            boxes.append([x, y, x + w, y + h])
            labels.append(a["category_id"])
    return {"boxes": torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4),
            "labels": torch.tensor(labels, dtype=torch.int64)}


def collate(batch):
    return [to_tensor(b[0]) for b in batch], [to_target(b[1]) for b in batch]


def train_one_epoch(model, loader, optimizer, device, epoch, rank):
    model.train()
    start = time.time()
    for i, (images, targets) in enumerate(loader):
        images = [im.to(device) for im in images]
        targets = [{k: v.to(device) for k, v in t.items()} for t in targets]
        losses = model(images, targets)
        loss = sum(losses.values())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and i % 20 == 0:
            parts = " ".join(f"{k}={v.item():.3f}" for k, v in losses.items())
            print(f"[{epoch}][{i}/{len(loader)}] {parts}", file=sys.stderr)
    return time.time() - start


def on_epoch_end(args, model, optimizer, scheduler, epoch, seconds):
    if dist.get_rank() == 0:
        path = os.path.join(args.output_dir, f"model_{epoch}.pth")
        torch.save({
            "model": model.module.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "epoch": epoch,
        }, path)
        dist.barrier()
        print(f"epoch {epoch} took {seconds / 60:.1f} min, saved {path}")


def main(args):
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group(backend="nccl", init_method="env://")
    rank = dist.get_rank()
    device = torch.device("cuda", local_rank)
    os.makedirs(args.output_dir, exist_ok=True)

    train = CocoDetection(args.images, args.annotations)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, args.batch_size, sampler=sampler, num_workers=4, collate_fn=collate)

    model = fasterrcnn_resnet50_fpn(weights=None, num_classes=91).to(device)
    model = DistributedDataParallel(model, device_ids=[local_rank])
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad],
                                lr=args.lr, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [16, 22], gamma=0.1)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        seconds = train_one_epoch(model, loader, optimizer, device, epoch, rank)
        scheduler.step()
        on_epoch_end(args, model, optimizer, scheduler, epoch, seconds)
    dist.destroy_process_group()


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--images", required=True)
    p.add_argument("--annotations", required=True)
    p.add_argument("--output-dir", default="./out")
    p.add_argument("--epochs", default=26, type=int)
    p.add_argument("--batch-size", default=2, type=int)
    p.add_argument("--lr", default=0.02, type=float)
    main(p.parse_args())
