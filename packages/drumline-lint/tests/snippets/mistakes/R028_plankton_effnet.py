import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchvision
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchvision import transforms as T

from planktonset import PlanktonImages


def get_loaders(root, batch_size, workers):
    train_t = T.Compose([T.RandomResizedCrop(224, (0.5, 1.0)), T.RandomHorizontalFlip(), T.RandomVerticalFlip(),
                         T.ToTensor()])
    val_t = T.Compose([T.Resize(256), T.CenterCrop(224), T.ToTensor()])
    train, val = PlanktonImages(root, "train", train_t), PlanktonImages(root, "val", val_t)
    sampler = DistributedSampler(train, shuffle=True)
    tl = DataLoader(train, batch_size, sampler=sampler, num_workers=workers, pin_memory=True, drop_last=True)
    vl = DataLoader(val, batch_size, num_workers=workers, pin_memory=True)
    return tl, vl, sampler, train.num_classes


def validate(model, loader, device):
    model.eval()
    correct = total = 0
    loss_sum = 0.0
    with torch.no_grad():
        for x, y in loader:
            x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
            logits = model(x)
            loss_sum += F.cross_entropy(logits, y, reduction="sum").item()
            correct += (logits.argmax(1) == y).sum().item()
            total += y.numel()
    return correct / total, loss_sum / total


def main():
    p = argparse.ArgumentParser()
    p.add_argument("root")
    p.add_argument("--epochs", type=int, default=90)
    p.add_argument("--batch-size", type=int, default=64, help="images per GPU")
    p.add_argument("--lr", type=float, default=0.05)
    p.add_argument("--workers", type=int, default=8)
    args = p.parse_args()

    dist.init_process_group("nccl")
    rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)

    train_loader, val_loader, sampler, n_cls = get_loaders(args.root, args.batch_size, args.workers)
    model = torchvision.models.efficientnet_b0(num_classes=n_cls).to(device)
    model = DDP(model, device_ids=[local_rank])
    opt = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, args.epochs)

    best = 0.0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in train_loader:
            logits = model(x.to(device, non_blocking=True))
            loss = F.cross_entropy(logits, y.to(device, non_blocking=True))
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
        sched.step()

        if rank == 0:
            acc, val_loss = validate(model, val_loader, device)
            print(f"epoch {epoch}: acc {acc:.4f} loss {val_loss:.4f}", flush=True)
            if acc > best:
                best = acc
                torch.save(model.module.state_dict(), "best.pth")
        dist.barrier()

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
