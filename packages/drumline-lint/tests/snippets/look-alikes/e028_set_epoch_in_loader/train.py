import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torchvision import transforms
from torchvision.datasets import EMNIST

from loader import EpochLoader


def build():
    return nn.Sequential(
        nn.Conv2d(1, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(64, 128, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(128 * 49, 512), nn.ReLU(), nn.Dropout(0.4), nn.Linear(512, 47))


def main():
    dist.init_process_group("nccl")
    rank, local = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)

    ds = EMNIST("/data", split="balanced", train=True, download=False,
                transform=transforms.Compose([transforms.RandomAffine(10, (0.1, 0.1)),
                                              transforms.ToTensor()]))
    loader = EpochLoader(ds, 256, num_workers=4)
    net = DDP(build().cuda(), device_ids=[local])
    opt = torch.optim.AdamW(net.parameters(), 1e-3)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 30)

    for epoch in range(30):
        for x, y in loader:
            loss = F.cross_entropy(net(x.cuda(non_blocking=True)), y.cuda(non_blocking=True))
            opt.zero_grad()
            loss.backward()
            opt.step()
        sched.step()
        if rank == 0:
            print(epoch, loss.item())

    if rank == 0:
        torch.save(net.module.state_dict(), "emnist.pth")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
