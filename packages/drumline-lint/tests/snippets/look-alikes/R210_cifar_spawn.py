import argparse
import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchvision import datasets, transforms
from torchvision.models import resnet18


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def worker(rank, world_size, port, args):
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = str(port)
    torch.cuda.set_device(rank)
    device = torch.device(f"cuda:{rank}")
    dist.init_process_group("nccl", rank=rank, world_size=world_size)

    tf = transforms.Compose([transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip(),
                             transforms.ToTensor()])
    train = datasets.CIFAR100(args.data, train=True, transform=tf, download=False)
    sampler = DistributedSampler(train, num_replicas=world_size, rank=rank, shuffle=True)
    loader = DataLoader(train, batch_size=args.batch_size // world_size, sampler=sampler, num_workers=4,
                        pin_memory=True, drop_last=True)
    model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(resnet18(num_classes=100)).to(device)
    model = DDP(model, device_ids=[rank])
    opt = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=5e-4)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, args.epochs)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            loss = F.cross_entropy(model(x.to(device, non_blocking=True)), y.to(device, non_blocking=True))
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
        sched.step()
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.3f}", flush=True)
            torch.save(model.module.state_dict(), args.out)
    dist.barrier()
    dist.destroy_process_group()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--data", default="./data")
    p.add_argument("--epochs", type=int, default=100)
    p.add_argument("--batch-size", type=int, default=512, help="over all GPUs")
    p.add_argument("--lr", type=float, default=0.2)
    p.add_argument("--out", default="resnet18_c100.pt")
    args = p.parse_args()
    datasets.CIFAR100(args.data, train=True, download=True)
    world_size = torch.cuda.device_count()
    mp.spawn(worker, args=(world_size, free_port(), args), nprocs=world_size, join=True)


if __name__ == "__main__":
    main()
