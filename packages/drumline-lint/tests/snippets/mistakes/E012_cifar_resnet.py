"""CIFAR-100 / ResNet-18 baseline.  torchrun --nproc_per_node=4 cifar_resnet.py"""
import os
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchvision
import torchvision.transforms as T
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

EPOCHS = 200
BATCH = 64
DATA = os.environ.get("CIFAR_ROOT", "/data/cifar")

MEAN, STD = (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)


def make_loader(rank, world):
    tf = T.Compose([T.RandomCrop(32, 4), T.RandomHorizontalFlip(),
                    T.ToTensor(), T.Normalize(MEAN, STD)])
    ds = torchvision.datasets.CIFAR100(DATA, train=True, transform=tf, download=False)
    sampler = DistributedSampler(ds, num_replicas=world, rank=rank, shuffle=True, drop_last=True)
    return DataLoader(ds, batch_size=BATCH, sampler=sampler, num_workers=4,
                      pin_memory=True, drop_last=True, persistent_workers=True)


def main():
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    gpu = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(gpu)
    torch.backends.cudnn.benchmark = True

    loader = make_loader(rank, world)
    net = torchvision.models.resnet18(num_classes=100)
    net.conv1 = torch.nn.Conv2d(3, 64, 3, 1, 1, bias=False)
    net.maxpool = torch.nn.Identity()
    net = DistributedDataParallel(net.cuda(gpu), device_ids=[gpu])

    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9,
                          weight_decay=5e-4, nesterov=True)
    sched = torch.optim.lr_scheduler.MultiStepLR(opt, [60, 120, 160], gamma=0.2)

    for epoch in range(EPOCHS):
        t0 = time.time()
        net.train()
        for x, y in loader:
            x = x.cuda(gpu, non_blocking=True)
            y = y.cuda(gpu, non_blocking=True)
            opt.zero_grad(set_to_none=True)
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            opt.step()
        sched.step()

        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if rank == 0:
            print(f"{epoch:3d} last-step loss {mean.item() / world:.4f} {time.time() - t0:.1f}s", flush=True)

    if rank == 0:
        torch.save(net.module.state_dict(), "cifar100_r18.pth")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
