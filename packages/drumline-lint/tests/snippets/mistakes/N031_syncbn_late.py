import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from cityscapes.data import Cityscapes
from cityscapes.deeplab import DeepLabV3Plus


def build_model(cfg, gpu):
    model = DeepLabV3Plus(num_classes=19, backbone=cfg["backbone"]).cuda(gpu)
    model = DistributedDataParallel(model, device_ids=[gpu], output_device=gpu)
    if cfg["sync_bn"]:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    return model


def poly_lr(opt, base, it, total):
    for g in opt.param_groups:
        g["lr"] = base * (1 - it / total) ** 0.9


def main():
    cfg = {"backbone": "resnet101", "sync_bn": True, "bs": 2, "lr": 0.01, "epochs": 180}
    dist.init_process_group("nccl")
    gpu = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(gpu)

    ds = Cityscapes("/data/cityscapes", "train", crop=768)
    sampler = DistributedSampler(ds)
    loader = DataLoader(ds, cfg["bs"], sampler=sampler, num_workers=4, drop_last=True, pin_memory=True)
    model = build_model(cfg, gpu)
    optimizer = torch.optim.SGD(model.parameters(), lr=cfg["lr"], momentum=0.9, weight_decay=1e-4)
    criterion = nn.CrossEntropyLoss(ignore_index=255)

    it, total = 0, cfg["epochs"] * len(loader)
    for epoch in range(cfg["epochs"]):
        sampler.set_epoch(epoch)
        model.train()
        for img, mask in loader:
            poly_lr(optimizer, cfg["lr"], it, total)
            loss = criterion(model(img.cuda(gpu)), mask.cuda(gpu))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            it += 1
        if dist.get_rank() == 0:
            torch.save(model.module.state_dict(), "deeplab.pth")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
