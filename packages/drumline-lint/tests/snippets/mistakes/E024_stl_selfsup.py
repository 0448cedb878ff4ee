import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import models, transforms
from torchvision.datasets import STL10


class TwoViews:
    def __init__(self):
        self.tf = transforms.Compose([
            transforms.RandomResizedCrop(96, scale=(0.2, 1.0)),
            transforms.RandomHorizontalFlip(),
            transforms.RandomApply([transforms.ColorJitter(0.4, 0.4, 0.4, 0.1)], p=0.8),
            transforms.RandomGrayscale(0.2),
            transforms.ToTensor(),
        ])

    def __call__(self, img):
        return self.tf(img), self.tf(img)


class SimSiam(nn.Module):
    def __init__(self, dim=2048):
        super().__init__()
        self.f = models.resnet18()
        self.f.fc = nn.Sequential(nn.Linear(512, dim), nn.BatchNorm1d(dim), nn.ReLU(),
                                  nn.Linear(dim, dim), nn.BatchNorm1d(dim, affine=False))
        self.h = nn.Sequential(nn.Linear(dim, 512), nn.BatchNorm1d(512), nn.ReLU(),
                               nn.Linear(512, dim))

    def forward(self, a, b):
        za, zb = self.f(a), self.f(b)
        pa, pb = self.h(za), self.h(zb)
        return -(F.cosine_similarity(pa, zb.detach()).mean()
                 + F.cosine_similarity(pb, za.detach()).mean()) / 2


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")

    train = STL10("./data", split="unlabeled", transform=TwoViews(), download=True)
    sampler = DistributedSampler(train, shuffle=True)
    loader = DataLoader(train, batch_size=128, sampler=sampler, num_workers=8,
                        pin_memory=True, drop_last=True)

    net = nn.SyncBatchNorm.convert_sync_batchnorm(SimSiam()).cuda()
    net = DDP(net, device_ids=[local_rank])
    opt = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 200)

    for epoch in range(200):
        sampler.set_epoch(epoch)
        for (a, b), _ in loader:
            loss = net(a.cuda(non_blocking=True), b.cuda(non_blocking=True))
            opt.zero_grad()
            loss.backward()
            opt.step()
        sched.step()
        if dist.get_rank() == 0:
            print(f"{epoch} {loss.item():.4f}", flush=True)
            torch.save(net.module.f.state_dict(), "simsiam_r18.pth")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
