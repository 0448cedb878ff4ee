import argparse
import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torchvision import datasets, models, transforms


def train(rank, world_size, args):
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = args.port
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=world_size)
    torch.manual_seed(1234 + rank)

    tf = transforms.Compose([
        transforms.RandomResizedCrop(224),
        transforms.RandomHorizontalFlip(),
        transforms.ToTensor(),
        transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
    ])
    train_set = datasets.ImageFolder(os.path.join(args.data, "train"), tf)
    train_loader = DataLoader(
        train_set,
        batch_size=args.batch_size // world_size,
        shuffle=True,
        num_workers=6,
        pin_memory=True,
        drop_last=True,
    )

    net = models.resnet34(num_classes=len(train_set.classes)).to(rank)
    net = DistributedDataParallel(net, device_ids=[rank])
    opt = torch.optim.SGD(net.parameters(), lr=args.lr, momentum=0.9, nesterov=True)

    for epoch in range(args.epochs):
        net.train()
        for i, (images, target) in enumerate(train_loader):
            images = images.to(rank, non_blocking=True)
            target = target.to(rank, non_blocking=True)
            loss = F.cross_entropy(net(images), target)
            opt.zero_grad()
            loss.backward()
            opt.step()
            if rank == 0 and i % 100 == 0:
                print(f"[{epoch}:{i}/{len(train_loader)}] {loss.item():.3f}")
        if rank == 0:
            torch.save({"epoch": epoch, "net": net.module.state_dict()}, args.save)

    dist.destroy_process_group()


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("data")
    p.add_argument("--epochs", type=int, default=30)
    p.add_argument("--batch-size", type=int, default=512, help="over all GPUs")
    p.add_argument("--lr", type=float, default=0.2)
    p.add_argument("--port", default="29571")
    p.add_argument("--save", default="crop_disease.pt")
    cli = p.parse_args()
    n_gpus = torch.cuda.device_count()
    mp.spawn(train, args=(n_gpus, cli), nprocs=n_gpus, join=True)
