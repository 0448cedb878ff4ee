# torchrun --nproc_per_node=4 train_landmarks.py --root data/wflw
import argparse
import csv
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torchvision.io import ImageReadMode, read_image
from torchvision.models import mobilenet_v3_small
from torchvision.transforms.functional import resize


class Faces(Dataset):
    def __init__(self, root):
        self.root = root
        with open(os.path.join(root, "landmarks.csv"), newline="") as f:
            self.rows = [(r[0], [float(v) for v in r[1:]]) for r in csv.reader(f)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        name, pts = self.rows[i]
        img = read_image(os.path.join(self.root, name), ImageReadMode.RGB)
        return resize(img, [128, 128], antialias=True).float().div(255), torch.tensor(pts)


def get_args():
    p = argparse.ArgumentParser(description="landmark regression")
    p.add_argument("--local_rank", type=int, default=0)
    p.add_argument("--root", required=True)
    p.add_argument("--epochs", type=int, default=100)
    p.add_argument("--batch", type=int, default=64)
    p.add_argument("--lr", type=float, default=1e-3)
    p.add_argument("--points", type=int, default=98)
    p.add_argument("--seed", type=int, default=3)
    return p.parse_args()


def main():
    args = get_args()
    torch.cuda.set_device(args.local_rank)
    dist.init_process_group(backend="nccl")
    device = torch.device("cuda", args.local_rank)
    torch.manual_seed(args.seed + dist.get_rank())

    data = Faces(args.root)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, args.batch, sampler=sampler, num_workers=4, pin_memory=True, drop_last=True)
    model = mobilenet_v3_small(weights=None, num_classes=2 * args.points).to(device)
    model = DDP(model, device_ids=[args.local_rank])
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, args.epochs)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        stat = torch.zeros(2, device=device)
        for img, pts in loader:
            loss = F.smooth_l1_loss(model(img.to(device)), pts.to(device))
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            stat += torch.stack([loss.detach(), torch.ones_like(loss)])
        sched.step()
        dist.all_reduce(stat)
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {(stat[0] / stat[1]).item():.5f}")
            torch.save(model.module.state_dict(), "landmarks.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
