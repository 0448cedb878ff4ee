"""CIFAR-100 baseline. torchrun --standalone --nproc_per_node=gpu cifar_first_run.py"""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchvision import transforms
from torchvision.datasets import CIFAR100
from torchvision.models import resnet18

MEAN, STD = (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)


def cifar(root="./data"):
    tf = transforms.Compose([
        transforms.RandomCrop(32, padding=4),
        transforms.RandomHorizontalFlip(),
        transforms.ToTensor(),
        transforms.Normalize(MEAN, STD),
    ])
    return CIFAR100(root, train=True, transform=tf, download=True)


def small_resnet():
    net = resnet18(num_classes=100)
    net.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    net.maxpool = nn.Identity()
    return net


def main():
    dist.init_process_group(backend="nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    is_main = dist.get_rank() == 0

    dataset = cifar()
    sampler = DistributedSampler(dataset, shuffle=True)
    loader = DataLoader(dataset, batch_size=128, sampler=sampler, num_workers=4,
                        pin_memory=True, drop_last=True, persistent_workers=True)

    net = DDP(small_resnet().cuda(), device_ids=[local_rank])
    opt = torch.optim.SGD(net.parameters(), lr=0.1 * dist.get_world_size(),
                          momentum=0.9, weight_decay=5e-4)
    sched = torch.optim.lr_scheduler.OneCycleLR(
        opt, max_lr=0.1 * dist.get_world_size(), epochs=100, steps_per_epoch=len(loader))

    for epoch in range(100):
        sampler.set_epoch(epoch)
        for x, y in loader:
            x, y = x.cuda(non_blocking=True), y.cuda(non_blocking=True)
            loss = nn.functional.cross_entropy(net(x), y)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            sched.step()
        if is_main:
            print(f"epoch {epoch} loss {loss.item():.3f}")

    if is_main:
        torch.save(net.module.state_dict(), "cifar100.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
