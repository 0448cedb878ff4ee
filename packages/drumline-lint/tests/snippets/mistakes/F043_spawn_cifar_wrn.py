"""Wide ResNet on CIFAR-100: python F043_spawn_cifar_wrn.py --gpus 4"""
import argparse
import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchvision import transforms as T
from torchvision.datasets import CIFAR100
from torchvision.models import wide_resnet50_2

MEAN, STD = (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)


def get_model():
    net = wide_resnet50_2(weights=None, num_classes=100)
    net.conv1 = torch.nn.Conv2d(3, 64, 3, padding=1, bias=False)
    net.maxpool = torch.nn.Identity()
    return net


def get_data(root):
    train_tf = T.Compose([T.RandomCrop(32, 4), T.RandomHorizontalFlip(), T.ToTensor(), T.Normalize(MEAN, STD)])
    test_tf = T.Compose([T.ToTensor(), T.Normalize(MEAN, STD)])
    train = CIFAR100(root, train=True, download=True, transform=train_tf)
    test = CIFAR100(root, train=False, download=True, transform=test_tf)
    return train, test


def worker(rank, world_size, args):
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = str(args.port)
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=world_size)

    train, test = get_data(args.root)
    train_sampler = DistributedSampler(train, shuffle=True)
    train_loader = DataLoader(train, 128, sampler=train_sampler, num_workers=4, drop_last=True)
    test_loader = DataLoader(test, 256, sampler=DistributedSampler(test, shuffle=False), num_workers=2)

    net = DDP(get_model().cuda(rank), device_ids=[rank])
    optimizer = torch.optim.SGD(net.parameters(), args.lr, momentum=0.9, weight_decay=5e-4, nesterov=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)

    for epoch in range(args.epochs):
        train_sampler.set_epoch(epoch)
        net.train()
        for x, y in train_loader:
            loss = F.cross_entropy(net(x.cuda(rank)), y.cuda(rank))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        scheduler.step()

        net.eval()
        counts = torch.zeros(2, device=rank)
        with torch.no_grad():
            for x, y in test_loader:
                counts[0] += (net(x.cuda(rank)).argmax(1) == y.cuda(rank)).sum()
                counts[1] += len(y)
        dist.all_reduce(counts)
        if rank == 0:
            print(f"epoch {epoch} acc {(counts[0] / counts[1]).item():.4f}", flush=True)
            torch.save(net.module.state_dict(), "wrn_cifar100.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", default="./data")
    parser.add_argument("--gpus", type=int, default=4)
    parser.add_argument("--port", type=int, default=29533)
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--lr", type=float, default=0.1)
    cli = parser.parse_args()
    mp.spawn(worker, args=(cli.gpus, cli), nprocs=cli.gpus, join=True)
