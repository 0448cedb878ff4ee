"""BYOL style pretraining.  torchrun --nproc_per_node 8 pretrain.py --data /data/imagenet"""
import argparse
import copy
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchvision import datasets, models, transforms as T


class TwoViews:
    def __init__(self, size):
        self.t = T.Compose([
            T.RandomResizedCrop(size, scale=(0.08, 1.0)),
            T.RandomHorizontalFlip(),
            T.ColorJitter(0.4, 0.4, 0.2, 0.1),
            T.RandomGrayscale(0.2),
            T.ToTensor(),
        ])

    def __call__(self, img):
        return self.t(img), self.t(img)


class Encoder(nn.Module):
    def __init__(self, dim=256):
        super().__init__()
        self.trunk = models.resnet50(weights=None, num_classes=2048)
        self.proj = nn.Sequential(nn.Linear(2048, 4096), nn.LayerNorm(4096), nn.ReLU(True), nn.Linear(4096, dim))
        self.pred = nn.Sequential(nn.Linear(dim, 4096), nn.LayerNorm(4096), nn.ReLU(True), nn.Linear(4096, dim))

    def forward(self, a, b):
        z = self.proj(self.trunk(torch.cat([a, b])))
        return self.pred(z).chunk(2)


@torch.no_grad()
def momentum_update(online, target, m):
    for p, q in zip(online.parameters(), target.parameters()):
        q.lerp_(p, 1.0 - m)


@torch.no_grad()
def project(target, a, b):
    return target.proj(target.trunk(torch.cat([a, b]))).chunk(2)


def main(args):
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed + rank)

    dataset = datasets.ImageFolder(os.path.join(args.data, "train"), TwoViews(224))
    sampler = DistributedSampler(dataset, num_replicas=world, rank=rank, shuffle=True)
    loader = DataLoader(dataset, args.batch_size // world, sampler=sampler, num_workers=8,
                        pin_memory=True, drop_last=True, persistent_workers=True)

    online = nn.SyncBatchNorm.convert_sync_batchnorm(Encoder()).cuda(local_rank)
    online = DistributedDataParallel(online, device_ids=[local_rank])
    target = copy.deepcopy(online.module).requires_grad_(False)
    opt = torch.optim.AdamW(online.parameters(), lr=args.lr, weight_decay=1e-6)

    step, total = 0, args.epochs * len(loader)
    for epoch in range(args.epochs):
        for (a, b), _ in loader:
            a, b = a.cuda(local_rank, non_blocking=True), b.cuda(local_rank, non_blocking=True)
            pa, pb = online(a, b)
            ta, tb = project(target, a, b)
            loss = 2 - F.cosine_similarity(pa, tb).mean() - F.cosine_similarity(pb, ta).mean()
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            momentum_update(online.module, target, 1 - 0.004 * (1 - step / total))
            step += 1
        if rank == 0:
            print(f"[{epoch}] loss {loss.item():.4f}")
            torch.save({"encoder": online.module.state_dict(), "target": target.state_dict()}, args.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--data", required=True)
    p.add_argument("--out", default="byol.pt")
    p.add_argument("--epochs", type=int, default=300)
    p.add_argument("--batch-size", type=int, default=4096)
    p.add_argument("--lr", type=float, default=3e-4)
    p.add_argument("--seed", type=int, default=0)
    main(p.parse_args())
