import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import models, transforms
from torchvision.datasets import Places365


def init_from_slurm():
    rank = int(os.environ["SLURM_PROCID"])
    world = int(os.environ["SLURM_NTASKS"])
    local = int(os.environ["SLURM_LOCALID"])
    torch.cuda.set_device(local)
    dist.init_process_group("nccl", init_method="env://", rank=rank, world_size=world)
    return rank, world, local


def main():
    rank, world, local = init_from_slurm()
    tf = transforms.Compose([transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip(),
                             transforms.ToTensor()])
    ds = Places365(os.environ["PLACES"], split="train-standard", small=True, transform=tf)
    sampler = DistributedSampler(ds, world, rank, shuffle=True)
    loader = DataLoader(ds, 128, sampler=sampler, num_workers=8, pin_memory=True, drop_last=True)

    net = DDP(models.resnet50(num_classes=365).cuda(), device_ids=[local])
    opt = torch.optim.SGD(net.parameters(), 0.1 * world / 2, momentum=0.9, weight_decay=1e-4)
    sched = torch.optim.lr_scheduler.StepLR(opt, 10)
    for epoch in range(30):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = torch.nn.functional.cross_entropy(net(x.cuda(non_blocking=True)),
                                                     y.cuda(non_blocking=True))
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
        sched.step()
        if rank == 0:
            torch.save(net.module.state_dict(), "places_r50.pth")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
