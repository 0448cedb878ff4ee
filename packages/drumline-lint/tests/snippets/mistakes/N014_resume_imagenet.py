import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torchvision
from torch.nn.parallel import DistributedDataParallel as DDP

from common.imagenet import make_train_loader

parser = argparse.ArgumentParser()
parser.add_argument("--resume", default="")
parser.add_argument("--out", default="checkpoint.pth.tar")
parser.add_argument("--epochs", default=90, type=int)
parser.add_argument("-b", "--batch-size", default=64, type=int)
parser.add_argument("--lr", default=0.1, type=float)


def resume(path, model, optimizer):
    if not os.path.isfile(path):
        raise FileNotFoundError(path)
    checkpoint = torch.load(path)
    model.load_state_dict(checkpoint["state_dict"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    return checkpoint["epoch"]


def main():
    args = parser.parse_args()
    dist.init_process_group("nccl")
    args.gpu = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(args.gpu)

    model = torchvision.models.resnet50().cuda(args.gpu)
    model = DDP(model, device_ids=[args.gpu])
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 30)
    criterion = nn.CrossEntropyLoss().cuda(args.gpu)

    start = 0
    if args.resume:
        start = resume(args.resume, model, optimizer)
        for _ in range(start):
            scheduler.step()

    loader, sampler = make_train_loader(args.batch_size)
    for epoch in range(start, args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            x = x.cuda(args.gpu, non_blocking=True)
            y = y.cuda(args.gpu, non_blocking=True)
            loss = criterion(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        scheduler.step()
        if dist.get_rank() == 0:
            torch.save({"epoch": epoch + 1, "state_dict": model.state_dict(),
                        "optimizer": optimizer.state_dict()}, args.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
