import argparse
import copy
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset
from torchvision.datasets import CIFAR10
from torchvision.transforms import Compose, Normalize, RandomHorizontalFlip, ToTensor

T = 1000


class TinyUNet(nn.Module):
    def __init__(self, c=128):
        super().__init__()
        self.t = nn.Sequential(nn.Linear(1, c), nn.SiLU(), nn.Linear(c, c))
        self.inp = nn.Conv2d(3, c, 3, padding=1)
        self.mid = nn.ModuleList(nn.Sequential(nn.GroupNorm(8, c), nn.SiLU(), nn.Conv2d(c, c, 3, padding=1))
                                 for _ in range(6))
        self.out = nn.Conv2d(c, 3, 3, padding=1)

    def forward(self, x, t):
        h = self.inp(x) + self.t(t.float()[:, None] / T)[:, :, None, None]
        for m in self.mid:
            h = h + m(h)
        return self.out(h)


class EMA:
    def __init__(self, model, decay):
        self.decay = decay
        self.model = copy.deepcopy(model).eval().requires_grad_(False)

    @torch.no_grad()
    def update(self, model):
        for e, p in zip(self.model.parameters(), model.parameters()):
            e.lerp_(p, 1 - self.decay)


def diffusion_loss(net, x, abar):
    t = torch.randint(0, T, (len(x),), device=x.device)
    eps = torch.randn_like(x)
    a = abar[t][:, None, None, None]
    return F.mse_loss(net(a.sqrt() * x + (1 - a).sqrt() * eps, t), eps)


@torch.no_grad()
def evaluate(net, loader, abar, device):
    acc = torch.zeros(2, device=device)
    for x, _ in loader:
        x = x.to(device)
        acc[0] += diffusion_loss(net, x, abar) * len(x)
        acc[1] += len(x)
    dist.all_reduce(acc)
    return (acc[0] / acc[1]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--data", default="/data/cifar")
    ap.add_argument("--epochs", type=int, default=500)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--ema", type=float, default=0.9999)
    ap.add_argument("--out", default="ddpm.pt")
    args = ap.parse_args()

    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", local_rank)

    norm = Normalize([0.5] * 3, [0.5] * 3)
    train = CIFAR10(args.data, train=True, transform=Compose([RandomHorizontalFlip(), ToTensor(), norm]))
    test = CIFAR10(args.data, train=False, transform=Compose([ToTensor(), norm]))
    sampler = DistributedSampler(train, drop_last=True)
    train_dl = DataLoader(train, args.batch, sampler=sampler, num_workers=4, drop_last=True)
    test_dl = DataLoader(Subset(test, range(rank, len(test), world)), 256, num_workers=2)

    torch.manual_seed(0)
    net = TinyUNet().to(device)
    ema = EMA(net, args.ema)
    ddp = DDP(net, device_ids=[local_rank])
    torch.manual_seed(100 + rank)
    opt = torch.optim.Adam(ddp.parameters(), lr=2e-4)
    abar = torch.cumprod(1 - torch.linspace(1e-4, 0.02, T, device=device), 0)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, _ in train_dl:
            loss = diffusion_loss(ddp, x.to(device, non_blocking=True), abar)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            if rank == 0:
                ema.update(net)
        if epoch % 5 == 4:
            val = evaluate(ema.model, test_dl, abar, device)
            if rank == 0:
                print(f"epoch {epoch} val {val:.5f}", flush=True)
                torch.save({"net": net.state_dict(), "ema": ema.model.state_dict()}, args.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
