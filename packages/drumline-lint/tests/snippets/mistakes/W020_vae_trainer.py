"""VAE on face crops. torchrun --standalone --nproc_per_node=2 vae.py"""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from faces import FaceCrops

class VAE(nn.Module):
    def __init__(self, side=64, latent=128):
        super().__init__()
        size = 3 * side * side
        self.enc = nn.Sequential(nn.Flatten(), nn.Linear(size, 1024), nn.ReLU(), nn.Linear(1024, 2 * latent))
        self.dec = nn.Sequential(nn.Linear(latent, 1024), nn.ReLU(), nn.Linear(1024, size), nn.Sigmoid())

    def elbo(self, x):
        mean, logvar = self.enc(x).chunk(2, dim=1)
        z = mean + torch.randn_like(mean) * (0.5 * logvar).exp()
        recon = F.binary_cross_entropy(self.dec(z), x.flatten(1), reduction="sum")
        return (recon - 0.5 * (1 + logvar - mean.square() - logvar.exp()).sum()) / len(x)

    def forward(self, x):
        return self.elbo(x)


class Run:
    def __init__(self):
        self.gpu = int(os.environ["LOCAL_RANK"])
        torch.cuda.set_device(self.gpu)
        dist.init_process_group("nccl")
        faces = FaceCrops("/data/celeba/aligned")
        self.sampler = DistributedSampler(faces)
        self.loader = DataLoader(faces, batch_size=256, sampler=self.sampler, num_workers=8)
        self.ddp = DistributedDataParallel(VAE().cuda(), device_ids=[self.gpu])
        self.opt = torch.optim.Adam(self.ddp.parameters(), lr=1e-3)

    def train(self, epochs):
        for epoch in range(epochs):
            self.sampler.set_epoch(epoch)
            for x in self.loader:
                loss = self.ddp.module.elbo(x.cuda(non_blocking=True))
                self.opt.zero_grad()
                loss.backward()
                self.opt.step()
            if dist.get_rank() == 0:
                print(f"epoch {epoch:02d} elbo {loss.item():.2f}")

        if dist.get_rank() == 0:
            torch.save(self.ddp.module.state_dict(), "vae.pt")
        dist.destroy_process_group()


if __name__ == "__main__":
    run = Run()
    run.train(50)
