import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class VAE(nn.Module):
    def __init__(self, genes=18000, latent=32):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(genes, 512), nn.ReLU(), nn.Linear(512, 2 * latent))
        self.dec = nn.Sequential(nn.Linear(latent, 512), nn.ReLU(), nn.Linear(512, genes))

    def forward(self, x):
        mu, logvar = self.enc(x).chunk(2, 1)
        z = mu + torch.randn_like(mu) * (0.5 * logvar).exp()
        return self.dec(z), mu, logvar

    def elbo(self, x, beta):
        rec, mu, logvar = self(x)
        kl = -0.5 * (1 + logvar - mu.pow(2) - logvar.exp()).sum(1)
        return ((rec - x).pow(2).sum(1) + beta * kl).mean()


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    counts = torch.load("/data/pbmc_log1p.pt", map_location="cpu")
    ds = TensorDataset(counts)
    sampler = DistributedSampler(ds, drop_last=True)
    loader = DataLoader(ds, 256, sampler=sampler, num_workers=2, drop_last=True)
    torch.manual_seed(dist.get_rank())
    model = DDP(VAE(counts.size(1)).cuda(), device_ids=[local_rank])
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(100):
        sampler.set_epoch(epoch)
        beta = min(1.0, epoch / 20)
        for (x,) in loader:
            loss = model.module.elbo(x.cuda(non_blocking=True), beta)
            opt.zero_grad()
            loss.backward()
            opt.step()
        if dist.get_rank() == 0 and epoch % 10 == 9:
            torch.save(model.module.state_dict(), f"scvae_{epoch}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
