# srun torchrun --nnodes=4 --nproc_per_node=8 --rdzv_backend=c10d --rdzv_endpoint=$HEAD:29500 stage_to_scratch.py
import os
import shutil

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchvision.models import resnet18

SHARED = "/lustre/project/tiles.pt"
LOCAL = "/local_nvme/tiles.pt"  # a disk of its own in each node


def stage(local_rank):
    if local_rank == 0:
        shutil.copyfile(SHARED, LOCAL)
    dist.barrier()
    return torch.load(LOCAL, map_location="cpu", mmap=True)


def main():
    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    blob = stage(local_rank)
    data = TensorDataset(blob["image"], blob["label"])
    sampler = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, batch_size=128, sampler=sampler)
    net = torch.nn.SyncBatchNorm.convert_sync_batchnorm(resnet18(num_classes=6))
    net = DDP(net.cuda(), device_ids=[local_rank])
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(30):
        sampler.set_epoch(epoch)
        for image, label in loader:
            loss = cross_entropy(net(image.cuda()), label.cuda())
            opt.zero_grad()
            loss.backward()
            opt.step()
        if dist.get_rank() == 0:
            torch.save(net.module.state_dict(), "/lustre/project/tiles_net.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
