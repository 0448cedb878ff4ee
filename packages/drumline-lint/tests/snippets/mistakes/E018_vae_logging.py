import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torch.utils.tensorboard import SummaryWriter


class VAE(nn.Module):
    def __init__(self, dim=784, hidden=512, z=32):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, 2 * z))
        self.dec = nn.Sequential(nn.Linear(z, hidden), nn.GELU(), nn.Linear(hidden, dim))

    def forward(self, x):
        mu, logvar = self.enc(x).chunk(2, -1)
        z = mu + torch.randn_like(mu) * (0.5 * logvar).exp()
        return self.dec(z), mu, logvar


def elbo(x, rec, mu, logvar):
    bce = F.binary_cross_entropy_with_logits(rec, x, reduction="none").sum(-1).mean()
    kl = -0.5 * (1 + logvar - mu.pow(2) - logvar.exp()).sum(-1).mean()
    return bce + kl


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--images", default="/data/mnist/images.pt")
    ap.add_argument("--logdir", default="tb/vae")
    ap.add_argument("--epochs", type=int, default=30)
    args = ap.parse_args()

    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)

    x = torch.load(args.images, map_location="cpu").float().flatten(1) / 255
    ds = TensorDataset(x)
    sampler = DistributedSampler(ds, drop_last=True)
    loader = DataLoader(ds, batch_size=256, sampler=sampler, drop_last=True)
    model = DDP(VAE().to(device), device_ids=[device.index])
    opt = torch.optim.Adam(model.parameters(), 1e-3)
    writer = SummaryWriter(args.logdir) if rank == 0 else None

    step = 0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for (batch,) in loader:
            batch = batch.to(device)
            loss = elbo(batch, *model(batch))
            opt.zero_grad()
            loss.backward()
            opt.step()
            step += 1
            if rank == 0 and step % 50 == 0:
                avg = loss.detach().clone()
                dist.all_reduce(avg, op=dist.ReduceOp.SUM)
                writer.add_scalar("train/elbo", avg.item() / world, step)

    if rank == 0:
        writer.close()
        torch.save(model.module.state_dict(), "vae.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
