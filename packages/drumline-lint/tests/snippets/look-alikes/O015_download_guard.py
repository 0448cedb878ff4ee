import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import datasets, models, transforms

ROOT = os.environ.get("DATA_ROOT", "/shared/data")


def get_dataset():
    tf = transforms.Compose([transforms.RandomCrop(32, 4), transforms.ToTensor()])
    if dist.get_rank() == 0:
        datasets.CIFAR100(ROOT, train=True, download=True)
    dist.barrier()
    return datasets.CIFAR100(ROOT, train=True, download=False, transform=tf)


def main():
    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    ds = get_dataset()
    sampler = DistributedSampler(ds)
    loader = DataLoader(ds, 128, sampler=sampler, num_workers=4, drop_last=True)
    model = DDP(models.resnet34(num_classes=100).cuda(), device_ids=[local_rank])
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(100):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.cross_entropy(model(x.cuda()), y.cuda())
            opt.zero_grad()
            loss.backward()
            opt.step()
        if dist.get_rank() == 0:
            torch.save(model.module.state_dict(), "c100.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
