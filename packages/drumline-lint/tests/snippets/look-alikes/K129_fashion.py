import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import datasets, transforms


def fetch(root, local_rank):
    if local_rank == 0:
        datasets.FashionMNIST(root, train=True, download=True)
    dist.barrier()
    return datasets.FashionMNIST(root, train=True, download=False, transform=transforms.ToTensor())


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    ds = fetch("/tmp/fashion", local_rank)
    sampler = DistributedSampler(ds, drop_last=True)
    loader = DataLoader(ds, 512, sampler=sampler, num_workers=2, pin_memory=True, drop_last=True)
    net = nn.Sequential(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 3), nn.ReLU(),
                        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(1600, 10))
    net = DDP(net.cuda(), device_ids=[local_rank])
    opt = torch.optim.Adam(net.parameters(), lr=2e-3)
    for epoch in range(12):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.cross_entropy(net(x.cuda(non_blocking=True)), y.cuda(non_blocking=True))
            opt.zero_grad()
            loss.backward()
            opt.step()
    if dist.get_rank() == 0:
        torch.save(net.module.state_dict(), "fashion.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
