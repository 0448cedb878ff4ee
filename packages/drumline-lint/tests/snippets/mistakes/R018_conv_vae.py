import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from imgdata import FolderOfImages


class ConvVAE(nn.Module):
    def __init__(self, zdim=128, ch=64):
        super().__init__()
        self.enc = nn.Sequential(
            nn.Conv2d(3, ch, 4, 2, 1), nn.SiLU(), nn.Conv2d(ch, 2 * ch, 4, 2, 1), nn.SiLU(),
            nn.Conv2d(2 * ch, 4 * ch, 4, 2, 1), nn.SiLU(), nn.Flatten(), nn.Linear(4 * ch * 64, 2 * zdim))
        self.fc = nn.Linear(zdim, 4 * ch * 64)
        self.dec = nn.Sequential(
            nn.ConvTranspose2d(4 * ch, 2 * ch, 4, 2, 1), nn.SiLU(),
            nn.ConvTranspose2d(2 * ch, ch, 4, 2, 1), nn.SiLU(), nn.ConvTranspose2d(ch, 3, 4, 2, 1))
        self.ch = ch

    def encode(self, x):
        return self.enc(x).chunk(2, dim=1)

    def decode(self, z):
        return self.dec(self.fc(z).view(-1, 4 * self.ch, 8, 8))

    def forward(self, x):
        mu, logvar = self.encode(x)
        z = mu + torch.randn_like(mu) * (0.5 * logvar).exp()
        return self.decode(z), mu, logvar


def elbo(recon, x, mu, logvar, beta):
    rec = F.mse_loss(recon, x, reduction="sum") / x.size(0)
    kl = -0.5 * (1 + logvar - mu.pow(2) - logvar.exp()).sum(1).mean()
    return rec + beta * kl, rec, kl


def train_step(model, x, beta, optimizer):
    mu, logvar = model.module.encode(x)
    z = mu + torch.randn_like(mu) * (0.5 * logvar).exp()
    recon = model.module.decode(z)
    loss, rec, kl = elbo(recon, x, mu, logvar, beta)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    return rec.detach(), kl.detach()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--data", required=True)
    p.add_argument("--epochs", type=int, default=100)
    p.add_argument("--bs", type=int, default=128)
    p.add_argument("--beta", type=float, default=1.0)
    args = p.parse_args()

    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    torch.manual_seed(1 + dist.get_rank())

    ds = FolderOfImages(args.data, size=64)
    sampler = DistributedSampler(ds, drop_last=True)
    loader = DataLoader(ds, args.bs, sampler=sampler, num_workers=8, pin_memory=True, drop_last=True)
    model = DDP(ConvVAE().cuda(), device_ids=[local_rank])
    opt = torch.optim.Adam(model.parameters(), lr=3e-4)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        tot = torch.zeros(2, device="cuda")
        for x in loader:
            rec, kl = train_step(model, x.cuda(non_blocking=True), args.beta, opt)
            tot += torch.stack([rec, kl])
        dist.all_reduce(tot, op=dist.ReduceOp.AVG)
        if dist.get_rank() == 0:
            rec, kl = (tot / len(loader)).tolist()
            print(f"{epoch:3d} rec {rec:.2f} kl {kl:.2f}", flush=True)
            torch.save(model.module.state_dict(), "vae.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
