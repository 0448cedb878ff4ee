"""Multi-task scene understanding: depth, normals and segmentation on a shared encoder."""
import argparse
import itertools
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import torchvision
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

TASKS = {"depth": 1, "normal": 3, "seg": 40}


class Shards(Dataset):
    def __init__(self, root, task):
        self.task = task
        self.files = sorted(os.path.join(root, task, f) for f in os.listdir(os.path.join(root, task)))

    def __len__(self):
        return len(self.files)

    def __getitem__(self, i):
        d = torch.load(self.files[i], map_location="cpu")
        return d["image"].float(), d["label"]


class MultiTaskNet(nn.Module):
    def __init__(self):
        super().__init__()
        r = torchvision.models.resnet50(weights=None)
        self.encoder = nn.Sequential(*list(r.children())[:-2])
        self.heads = nn.ModuleDict({
            t: nn.Sequential(nn.Conv2d(2048, 256, 3, padding=1), nn.ReLU(), nn.Conv2d(256, c, 1))
            for t, c in TASKS.items()})

    def forward(self, x, task):
        f = self.encoder(x)
        y = self.heads[task](f)
        return F.interpolate(y, size=x.shape[-2:], mode="bilinear", align_corners=False)


def loss_for(task, out, y):
    if task == "seg":
        return F.cross_entropy(out, y.long(), ignore_index=255)
    if task == "normal":
        return (1 - F.cosine_similarity(out, y.float(), dim=1)).mean()
    return F.l1_loss(out, y.float())


def forever(loader, sampler):
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        yield from loader


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--root", default="/data/nyud_mt")
    ap.add_argument("--iters", type=int, default=40000)
    ap.add_argument("--batch", type=int, default=8)
    ap.add_argument("--lr", type=float, default=1e-4)
    ap.add_argument("--save-every", type=int, default=2000)
    ap.add_argument("--out", default="mtl.pt")
    args = ap.parse_args()

    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    rank = dist.get_rank()

    streams = {}
    for t in TASKS:
        ds = Shards(args.root, t)
        s = DistributedSampler(ds, shuffle=True)
        streams[t] = forever(DataLoader(ds, args.batch, sampler=s, num_workers=2, drop_last=True), s)

    net = nn.SyncBatchNorm.convert_sync_batchnorm(MultiTaskNet()).cuda()
    model = DistributedDataParallel(net, device_ids=[local_rank])
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr)
    order = list(TASKS)

    for it in range(args.iters):
        task = order[it % len(order)]
        x, y = next(streams[task])
        x, y = x.cuda(non_blocking=True), y.cuda(non_blocking=True)
        loss = loss_for(task, model(x, task), y)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        if rank == 0 and it % 60 < len(order):
            print(f"{it:6d} {task:7s} {loss.item():.4f}", flush=True)
        if rank == 0 and it % args.save_every == args.save_every - 1:
            torch.save(net.state_dict(), args.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
