import argparse
import os

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import datasets, transforms


class StyleEncoder(nn.Module):
    def __init__(self, width=64, style=256):
        super().__init__()
        self.trunk = nn.Sequential(nn.Conv2d(3, width, 3, 2, 1), nn.ReLU(), nn.Conv2d(width, width, 3, 2, 1))
        self.to_style = nn.Linear(width, style)
        self.decode = nn.Sequential(nn.Conv2d(width + style, width, 3, 1, 1), nn.ReLU(),
                                    nn.Upsample(scale_factor=4), nn.Conv2d(width, 3, 3, 1, 1))

    def forward(self, x):
        h = self.trunk(x)
        s = self.to_style(h.mean((2, 3)))
        s = s[:, :, None, None].expand(-1, -1, h.size(2), h.size(3))
        return self.decode(torch.cat([h, s], 1))


def setup(args):
    args.local_rank = int(os.environ["LOCAL_RANK"])
    args.device = torch.device("cuda", args.local_rank)
    torch.cuda.set_device(args.device)
    dist.init_process_group("nccl", device_id=args.device)
    args.rank = dist.get_rank()
    torch.manual_seed(args.seed + args.rank)


def train(args, model, loader, sampler, opt):
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for img, _ in loader:
            img = img.to(args.device, non_blocking=True)
            recon = model.module(img)
            loss = F.l1_loss(recon, img)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
        if args.rank == 0:
            torch.save(model.module.state_dict(), os.path.join(args.ckpt_dir, f"{epoch:03d}.pt"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("path")
    parser.add_argument("--ckpt-dir", default="/checkpoints/style")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--seed", type=int, default=12)
    args = parser.parse_args()
    setup(args)
    tf = transforms.Compose([transforms.Resize((256, 256)), transforms.ToTensor()])
    ds = datasets.ImageFolder(args.path, tf)
    sampler = DistributedSampler(ds, shuffle=True, seed=args.seed, drop_last=True)
    loader = DataLoader(ds, args.batch, sampler=sampler, num_workers=8, pin_memory=True, drop_last=True)
    model = DDP(StyleEncoder().to(args.device), device_ids=[args.local_rank])
    train(args, model, loader, sampler, optim.Adam(model.parameters(), lr=2e-3, betas=(0, 0.99)))
    dist.destroy_process_group()
