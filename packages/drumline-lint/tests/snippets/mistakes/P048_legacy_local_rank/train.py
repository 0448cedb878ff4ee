import argparse
import os
import shutil

import torch
import torch.distributed as dist
import torchvision.models as models
import torchvision.transforms as T
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchvision.datasets import ImageFolder

parser = argparse.ArgumentParser(description="Places365 training")
parser.add_argument("--data", metavar="DIR", required=True)
parser.add_argument("--arch", default="convnext_tiny")
parser.add_argument("--epochs", default=60, type=int)
parser.add_argument("-b", "--batch-size", default=96, type=int)
parser.add_argument("--lr", default=1e-3, type=float)
parser.add_argument("-j", "--workers", default=8, type=int)
parser.add_argument("--local_rank", default=0, type=int)


def save_checkpoint(state, is_best, folder="."):
    path = os.path.join(folder, "checkpoint.pth.tar")
    torch.save(state, path)
    if is_best:
        shutil.copyfile(path, os.path.join(folder, "model_best.pth.tar"))


def main():
    args = parser.parse_args()
    torch.cuda.set_device(args.local_rank)
    dist.init_process_group(backend="nccl", init_method="env://")
    rank = dist.get_rank()

    model = models.get_model(args.arch, weights=None, num_classes=365).cuda(args.local_rank)
    model = DistributedDataParallel(model, device_ids=[args.local_rank])
    criterion = torch.nn.CrossEntropyLoss(label_smoothing=0.1).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), args.lr, weight_decay=0.05)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs)

    train_set = ImageFolder(os.path.join(args.data, "train"), T.Compose([
        T.RandomResizedCrop(224), T.RandomHorizontalFlip(), T.ToTensor(),
        T.Normalize(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225])]))
    sampler = DistributedSampler(train_set, shuffle=True)
    loader = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler, num_workers=args.workers,
                        pin_memory=True, drop_last=True)

    best = float("inf")
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        total = torch.zeros((), device="cuda")
        for x, y in loader:
            x, y = x.cuda(non_blocking=True), y.cuda(non_blocking=True)
            loss = criterion(model(x), y)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            total += loss.detach()
        scheduler.step()
        dist.all_reduce(total)
        mean = total.item() / (len(loader) * dist.get_world_size())
        if rank == 0:
            print(f"=> epoch {epoch}: loss {mean:.4f}")
            save_checkpoint({"epoch": epoch + 1, "state_dict": model.module.state_dict(),
                             "optimizer": optimizer.state_dict()}, mean < best)
            best = min(best, mean)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
