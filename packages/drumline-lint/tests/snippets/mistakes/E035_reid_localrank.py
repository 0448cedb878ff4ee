"""Person re-id baseline (Market-1501).

    torchrun --nproc_per_node=4 reid.py --root /data/market1501
"""
import argparse
import os
import re

import torch
import torch.distributed as dist
from PIL import Image
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler
from torchvision import models, transforms


class Market(Dataset):
    PATTERN = re.compile(r"(\d+)_c\d")

    def __init__(self, root):
        folder = os.path.join(root, "bounding_box_train")
        self.files = [os.path.join(folder, f) for f in sorted(os.listdir(folder)) if self.PATTERN.match(f)]
        raw = [int(self.PATTERN.match(os.path.basename(f)).group(1)) for f in self.files]
        index = {p: i for i, p in enumerate(sorted(set(raw)))}
        self.pids = [index[p] for p in raw]
        self.n_ids = len(index)
        self.tf = transforms.Compose([
            transforms.Resize((256, 128)), transforms.RandomHorizontalFlip(), transforms.Pad(10),
            transforms.RandomCrop((256, 128)), transforms.ToTensor(), transforms.RandomErasing()])

    def __len__(self):
        return len(self.files)

    def __getitem__(self, i):
        return self.tf(Image.open(self.files[i]).convert("RGB")), self.pids[i]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", required=True)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--local_rank", type=int, default=0)
    args = parser.parse_args()

    torch.cuda.set_device(args.local_rank)
    dist.init_process_group(backend="nccl", init_method="env://")

    ds = Market(args.root)
    sampler = DistributedSampler(ds)
    loader = DataLoader(ds, args.batch_size, sampler=sampler, num_workers=4,
                        pin_memory=True, drop_last=True)

    net = models.resnet50(weights="IMAGENET1K_V2")
    net.fc = nn.Linear(2048, ds.n_ids)
    net = DistributedDataParallel(net.cuda(), device_ids=[args.local_rank])
    opt = torch.optim.Adam(net.parameters(), 3.5e-4, weight_decay=5e-4)
    sched = torch.optim.lr_scheduler.StepLR(opt, 20, 0.1)
    crit = nn.CrossEntropyLoss(label_smoothing=0.1)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, pid in loader:
            loss = crit(net(x.cuda(non_blocking=True)), pid.cuda(non_blocking=True))
            opt.zero_grad()
            loss.backward()
            opt.step()
        sched.step()
        if dist.get_rank() == 0:
            print(f"Epoch {epoch}: {loss.item():.3f}")
            torch.save(net.module.state_dict(), "market.pth")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
