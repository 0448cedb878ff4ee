"""Stochastic weight averaging for the defect classifier.  torchrun --nproc_per_node=4 swa.py"""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchvision.models import resnet34

from defects import DefectCrops

EPOCHS, SWA_START = 60, 45


def main():
    gpu = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(gpu)
    dist.init_process_group("nccl")
    rank = dist.get_rank()

    crops = DefectCrops("/data/defects/train.lmdb")
    sampler = DistributedSampler(crops, drop_last=True)
    loader = DataLoader(crops, batch_size=16, sampler=sampler, num_workers=4, drop_last=True)

    net = nn.SyncBatchNorm.convert_sync_batchnorm(resnet34(num_classes=9)).cuda()
    swa_net = AveragedModel(net)
    ddp = DDP(net, device_ids=[gpu])
    opt = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    swa_sched = SWALR(opt, swa_lr=0.01)

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        ddp.train()
        for x, y in loader:
            opt.zero_grad()
            F.cross_entropy(ddp(x.cuda()), y.cuda()).backward()
            opt.step()
        if epoch >= SWA_START:
            swa_net.update_parameters(net)
            swa_sched.step()

    if rank == 0:
        update_bn(loader, swa_net, device=torch.device("cuda", gpu))
        torch.save(swa_net.module.state_dict(), "defects_swa.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
