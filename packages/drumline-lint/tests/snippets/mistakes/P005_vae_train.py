import os
import argparse
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torch.utils.tensorboard import SummaryWriter
from torchvision.datasets import CelebA
import torchvision.transforms as T


class ConvVAE(nn.Module):
    def __init__(self, z=128):
        super().__init__()
        self.enc = nn.Sequential(
            nn.Conv2d(3, 32, 4, 2, 1), nn.SiLU(),
            nn.Conv2d(32, 64, 4, 2, 1), nn.SiLU(),
            nn.Conv2d(64, 128, 4, 2, 1), nn.SiLU(), nn.Flatten())
        self.to_stats = nn.Linear(128 * 8 * 8, 2 * z)
        self.from_z = nn.Linear(z, 128 * 8 * 8)
        self.dec = nn.Sequential(
            nn.ConvTranspose2d(128, 64, 4, 2, 1), nn.SiLU(),
            nn.ConvTranspose2d(64, 32, 4, 2, 1), nn.SiLU(),
            nn.ConvTranspose2d(32, 3, 4, 2, 1))

    def encode(self, x):
        return self.to_stats(self.enc(x)).chunk(2, dim=1)

    def decode(self, z):
        return torch.sigmoid(self.dec(self.from_z(z).view(-1, 128, 8, 8)))

    def forward(self, x):
        mu, logvar = self.encode(x)
        z = mu + torch.randn_like(mu) * (0.5 * logvar).exp()
        return self.decode(z), mu, logvar


def elbo(recon, x, mu, logvar, beta):
    rec = F.mse_loss(recon, x, reduction="sum") / x.size(0)
    kl = -0.5 * (1 + logvar - mu.pow(2) - logvar.exp()).sum(1).mean()
    return rec + beta * kl, rec, kl


def run(args):
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    torch.manual_seed(args.seed + rank)

    tf = T.Compose([T.CenterCrop(148), T.Resize(64), T.ToTensor()])
    train_set = CelebA(args.data, split="train", transform=tf)
    sampler = DistributedSampler(train_set, drop_last=True)
    loader = DataLoader(train_set, args.batch, sampler=sampler, num_workers=8, drop_last=True)

    model = DistributedDataParallel(ConvVAE(args.z).cuda(), device_ids=[local_rank])
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)
    writer = SummaryWriter(args.logdir) if rank == 0 else None
    step = 0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        beta = min(1.0, (epoch + 1) / args.warmup)
        for x, _ in loader:
            x = x.cuda(non_blocking=True)
            mu, logvar = model.module.encode(x)
            z = mu + torch.randn_like(mu) * (0.5 * logvar).exp()
            recon = model.module.decode(z)
            loss, rec, kl = elbo(recon, x, mu, logvar, beta)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            if writer is not None and step % 50 == 0:
                writer.add_scalar("rec", rec.item(), step)
                writer.add_scalar("kl", kl.item(), step)
            step += 1
        if rank == 0:
            torch.save(model.module.state_dict(), os.path.join(args.logdir, "vae.pt"))
    if writer is not None:
        writer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--data", default="/data")
    ap.add_argument("--z", type=int, default=128)
    ap.add_argument("--epochs", type=int, default=25)
    ap.add_argument("--warmup", type=int, default=5)
    ap.add_argument("--batch", type=int, default=128)
    ap.add_argument("--lr", type=float, default=2e-4)
    ap.add_argument("--seed", type=int, default=0)
    ap.add_argument("--logdir", default="logs/vae")
    run(ap.parse_args())
