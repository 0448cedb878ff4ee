import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchvision import transforms
from torchvision.datasets import CIFAR100
from torchvision.models import resnet18


def parse():
    p = argparse.ArgumentParser(description="CIFAR-100; launch with torchrun")
    p.add_argument("--epochs", type=int, default=100)
    p.add_argument("--batch-size", type=int, default=256,
                   help="total batch size, summed over all GPUs; --lr belongs to this size")
    p.add_argument("--lr", type=float, default=0.1)
    return p.parse_args()


def main():
    args = parse()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    ops = transforms.Compose([
        transforms.RandomCrop(32, padding=4),
        transforms.RandomHorizontalFlip(),
        transforms.ToTensor(),
        transforms.Normalize((0.507, 0.487, 0.441), (0.267, 0.256, 0.276)),
    ])
    train = CIFAR100("/data/cifar", train=True, transform=ops)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=args.batch_size, sampler=sampler, num_workers=4, pin_memory=True)

    net = DistributedDataParallel(resnet18(num_classes=100).cuda(), device_ids=[local_rank])
    opt = torch.optim.SGD(net.parameters(), lr=args.lr, momentum=0.9, weight_decay=5e-4, nesterov=True)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, args.epochs)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        net.train()
        for x, y in loader:
            opt.zero_grad(set_to_none=True)
            loss = F.cross_entropy(net(x.cuda(non_blocking=True)), y.cuda(non_blocking=True))
            loss.backward()
            opt.step()
        sched.step()
        if dist.get_rank() == 0:
            print(f"[{epoch + 1}/{args.epochs}] loss {loss.item():.3f}")
    if dist.get_rank() == 0:
        torch.save(net.module.state_dict(), "cifar100_r18.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
