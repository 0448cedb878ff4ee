"""Leaf disease classifier.

Usage: torchrun --nproc_per_node=8 K023_plants.py --data /data/leaves
"""
import argparse

import torch
import torch.distributed as dist
import torchvision
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchvision import transforms as T

parser = argparse.ArgumentParser()
parser.add_argument("--data", required=True)
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--local_rank", type=int, default=0)


def main(args):
    torch.cuda.set_device(args.local_rank)
    dist.init_process_group(backend="nccl", init_method="env://")
    tf = T.Compose([T.RandomResizedCrop(224), T.ToTensor()])
    ds = torchvision.datasets.ImageFolder(args.data, tf)
    sampler = DistributedSampler(ds, drop_last=True)
    loader = DataLoader(ds, args.batch_size, sampler=sampler, num_workers=4,
                        drop_last=True, pin_memory=True)
    model = torchvision.models.convnext_tiny(num_classes=len(ds.classes)).cuda()
    model = DDP(model, device_ids=[args.local_rank])
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for img, label in loader:
            img, label = img.cuda(non_blocking=True), label.cuda(non_blocking=True)
            loss = criterion(model(img), label)
            opt.zero_grad()
            loss.backward()
            opt.step()
        if dist.get_rank() == 0:
            torch.save(model.module.state_dict(), "leaves.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(parser.parse_args())
