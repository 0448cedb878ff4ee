"""Geolocation from photos, 4 nodes x 8 GPUs (torchrun, c10d rendezvous)."""
import os
import tarfile

import torch
import torch.distributed as dist
import torchvision
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import transforms as T

ARCHIVE = "/lustre/datasets/im2gps.tar"
FAST = "/tmp/im2gps"


def stage_in():
    if os.path.isdir(FAST):
        return
    with tarfile.open(ARCHIVE) as tar:
        tar.extractall("/tmp/im2gps.part")
    os.rename("/tmp/im2gps.part", FAST)


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    if rank == 0:
        stage_in()
    dist.barrier()

    tf = T.Compose([T.RandomResizedCrop(288), T.ToTensor()])
    ds = torchvision.datasets.ImageFolder(f"{FAST}/train", tf)
    sampler = DistributedSampler(ds, drop_last=True)
    loader = DataLoader(ds, 48, sampler=sampler, num_workers=10, pin_memory=True, drop_last=True)
    net = torchvision.models.efficientnet_v2_s(num_classes=len(ds.classes))
    net = DDP(net.cuda(), device_ids=[local_rank])
    opt = torch.optim.SGD(net.parameters(), lr=0.4, momentum=0.9)
    for epoch in range(40):
        sampler.set_epoch(epoch)
        for img, cell in loader:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = nn.functional.cross_entropy(net(img.cuda()), cell.cuda())
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0:
            torch.save(net.module.state_dict(), "/lustre/runs/geo.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
