import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import datasets, models, transforms


class TwoViews:
    def __init__(self, tf):
        self.tf = tf

    def __call__(self, img):
        return self.tf(img), self.tf(img)


class SimCLR(nn.Module):
    def __init__(self, dim=128):
        super().__init__()
        self.net = models.resnet50(weights=None)
        self.net.fc = nn.Sequential(nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, dim))

    def forward(self, x):
        return F.normalize(self.net(x), dim=-1)


def all_with_local_grad(x):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.detach().contiguous())
    parts[dist.get_rank()] = x
    return torch.cat(parts)


def info_nce(a, b, temperature):
    a, b = all_with_local_grad(a), all_with_local_grad(b)
    logits = a @ b.t() / temperature
    target = torch.arange(len(logits), device=logits.device)
    return 0.5 * (F.cross_entropy(logits, target) + F.cross_entropy(logits.t(), target))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--data", default="/data/imagenet/train")
    ap.add_argument("--epochs", type=int, default=200)
    ap.add_argument("--bs", type=int, default=128)
    ap.add_argument("--temp", type=float, default=0.1)
    ap.add_argument("--out", default="simclr.pt")
    args = ap.parse_args()

    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    torch.manual_seed(31 + rank)

    tf = transforms.Compose([transforms.RandomResizedCrop(224, (0.2, 1)), transforms.RandomHorizontalFlip(),
                             transforms.ColorJitter(0.4, 0.4, 0.4, 0.1), transforms.ToTensor()])
    ds = datasets.ImageFolder(args.data, TwoViews(tf))
    sampler = DistributedSampler(ds, drop_last=True)
    dl = DataLoader(ds, args.bs, sampler=sampler, num_workers=12, pin_memory=True, drop_last=True)
    net = nn.SyncBatchNorm.convert_sync_batchnorm(SimCLR()).cuda()
    model = DDP(net, device_ids=[local_rank])
    opt = torch.optim.SGD(model.parameters(), lr=0.3 * args.bs * dist.get_world_size() / 256, momentum=0.9)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, args.epochs)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for (v1, v2), _ in dl:
            z = model(torch.cat([v1, v2]).cuda(non_blocking=True))
            a, b = z.chunk(2)
            loss = info_nce(a, b, args.temp)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
        sched.step()
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}", flush=True)
            torch.save(net.net.state_dict(), args.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
