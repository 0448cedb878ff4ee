import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import datasets, models, transforms as T

from utils.dist import init, local_rank, rank
from utils.stage import stage_dataset


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--archive", default="/gpfs/data/places365.tar")
    ap.add_argument("--epochs", type=int, default=30)
    args = ap.parse_args()
    init()
    root = stage_dataset(args.archive)
    ds = datasets.ImageFolder(root, T.Compose([T.RandomResizedCrop(224), T.RandomHorizontalFlip(), T.ToTensor()]))
    sampler = DistributedSampler(ds)
    loader = DataLoader(ds, 96, sampler=sampler, num_workers=10, pin_memory=True)
    model = DDP(models.mobilenet_v3_large(num_classes=365).cuda(), device_ids=[local_rank()])
    opt = torch.optim.RMSprop(model.parameters(), 0.02, momentum=0.9)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.cross_entropy(model(x.cuda(non_blocking=True)), y.cuda(non_blocking=True))
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank() == 0:
            print(epoch, loss.item())
            torch.save(model.module.state_dict(), "/gpfs/runs/places.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
