import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import torchvision
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import datasets, transforms

TEMP = 4.0
ALPHA = 0.7


def reduce_mean(tensor, world_size):
    dist.all_reduce(tensor, op=dist.ReduceOp.SUM)
    tensor /= world_size
    return tensor


def kd_loss(student_logits, teacher_logits, target):
    soft = F.kl_div(F.log_softmax(student_logits / TEMP, 1), F.softmax(teacher_logits / TEMP, 1),
                    reduction="batchmean") * TEMP * TEMP
    return ALPHA * soft + (1 - ALPHA) * F.cross_entropy(student_logits, target)


def build(device):
    teacher = torchvision.models.resnet50(num_classes=100)
    teacher.load_state_dict(torch.load("teacher.pt", map_location="cpu", weights_only=True))
    teacher.to(device).eval().requires_grad_(False)
    student = torchvision.models.mobilenet_v3_small(num_classes=100).to(device)
    return teacher, nn.SyncBatchNorm.convert_sync_batchnorm(student)


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)

    ds = datasets.CIFAR100("/data", train=True, transform=transforms.ToTensor())
    sampler = DistributedSampler(ds, drop_last=True)
    loader = DataLoader(ds, 128, sampler=sampler, num_workers=4, drop_last=True)
    teacher, student = build(device)
    student = DDP(student, device_ids=[local_rank])
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(120):
        sampler.set_epoch(epoch)
        student.train()
        for step, (x, y) in enumerate(loader):
            x, y = x.to(device), y.to(device)
            with torch.no_grad():
                t = teacher(x)
            loss = kd_loss(student(x), t, y)
            loss = reduce_mean(loss, world_size)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if rank == 0 and step % 100 == 0:
                print(epoch, step, round(loss.item(), 4))
    if rank == 0:
        torch.save(student.module.state_dict(), "student.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
