import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from arcface.data import MXFaceDataset
from arcface.heads import ArcMargin
from arcface.iresnet import iresnet50


class Embedder(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.backbone = iresnet50()
        self.head = ArcMargin(512, classes)

    def forward(self, x, y):
        return self.head(self.backbone(x), y)


def build_loader(root, bs):
    ds = MXFaceDataset(root)
    sampler = DistributedSampler(ds)
    return sampler, DataLoader(
        dataset=ds,
        batch_size=bs,
        shuffle=True,
        sampler=sampler,
        num_workers=8,
        drop_last=True,
    )


def main():
    dist.init_process_group("nccl", init_method="env://")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    sampler, loader = build_loader("/data/ms1m", 128)
    model = DDP(Embedder(85742).cuda(), device_ids=[local_rank])
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ce = nn.CrossEntropyLoss()
    for epoch in range(16):
        sampler.set_epoch(epoch)
        for img, label in loader:
            img, label = img.cuda(non_blocking=True), label.cuda(non_blocking=True)
            loss = ce(model(img, label), label)
            opt.zero_grad()
            loss.backward()
            opt.step()
        if dist.get_rank() == 0:
            torch.save(model.module.backbone.state_dict(), f"r50_{epoch}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
