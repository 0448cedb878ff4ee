import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchvision import datasets, models, transforms


def get_args():
    p = argparse.ArgumentParser()
    p.add_argument("--data", required=True)
    p.add_argument("--out", default="face.pt")
    p.add_argument("--epochs", type=int, default=20)
    p.add_argument("--batch-size", type=int, default=128)
    p.add_argument("--lr", type=float, default=0.1)
    return p.parse_args()


def main():
    args = get_args()
    dist.init_process_group("nccl", init_method="env://")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)

    tf = transforms.Compose([
        transforms.Resize(128),
        transforms.RandomCrop(112),
        transforms.RandomHorizontalFlip(),
        transforms.ToTensor(),
        transforms.Normalize([0.5] * 3, [0.5] * 3),
    ])
    faces = datasets.ImageFolder(args.data, tf)
    sampler = DistributedSampler(faces, shuffle=True)
    loader = DataLoader(faces, args.batch_size, sampler=sampler,
                        num_workers=8, pin_memory=True, drop_last=True)

    model = models.resnet50(num_classes=len(faces.classes)).cuda(local_rank)
    model = DDP(model, device_ids=[local_rank])
    opt = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, weight_decay=5e-4)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, args.epochs)
    loss_fn = nn.CrossEntropyLoss()

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for img, ident in loader:
            img = img.cuda(local_rank, non_blocking=True)
            ident = ident.cuda(local_rank, non_blocking=True)
            loss = loss_fn(model(img), ident)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
        sched.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f} (last batch, rank 0)")
            torch.save(model.module.state_dict(), args.out)

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
