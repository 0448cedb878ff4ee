"""Panoptic pretraining on 4 nodes; micro batch 1, effective 16 per GPU."""
import os

import torch
import torch.distributed as dist
import torchvision
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

ACCUM = 16


class Scenes(Dataset):
    def __init__(self, listing):
        with open(listing) as fh:
            self.files = fh.read().split()

    def __len__(self):
        return len(self.files)

    def __getitem__(self, i):
        d = torch.load(self.files[i], map_location="cpu")
        return d["image"], d["label"].long()


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    ds = Scenes("/lustre/scenes/train.txt")
    sampler = DistributedSampler(ds, drop_last=True)
    loader = DataLoader(ds, batch_size=1, sampler=sampler, num_workers=6, pin_memory=True)
    net = torchvision.models.segmentation.deeplabv3_resnet101(weights_backbone=None, num_classes=133)
    net = nn.SyncBatchNorm.convert_sync_batchnorm(net).cuda()
    net = DDP(net, device_ids=[local_rank])
    opt = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    for epoch in range(24):
        sampler.set_epoch(epoch)
        opt.zero_grad()
        for i, (image, label) in enumerate(loader):
            logits = net(image.cuda(non_blocking=True))["out"]
            loss = nn.functional.cross_entropy(logits, label.cuda(non_blocking=True), ignore_index=255)
            (loss / ACCUM).backward()
            if (i + 1) % ACCUM == 0:
                opt.step()
                opt.zero_grad()
        if dist.get_rank() == 0:
            torch.save(net.module.state_dict(), f"/lustre/runs/deeplab_{epoch}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
