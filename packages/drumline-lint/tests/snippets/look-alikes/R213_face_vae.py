import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchvision.utils import save_image

from faces.config import parse
from faces.data import AlignedFaces
from faces.nets import Decoder, Encoder


class VAE(nn.Module):
    def __init__(self, zdim):
        super().__init__()
        self.encoder, self.decoder = Encoder(zdim), Decoder(zdim)
        self.log_sigma = nn.Parameter(torch.zeros(()))

    def encode(self, x):
        return self.encoder(x).chunk(2, 1)

    def forward(self, x):
        mu, logvar = self.encode(x)
        z = mu + torch.randn_like(mu) * (0.5 * logvar).exp()
        recon = self.decoder(z)
        nll = 0.5 * ((recon - x) / self.log_sigma.exp()).pow(2) + self.log_sigma
        kl = -0.5 * (1 + logvar - mu.pow(2) - logvar.exp())
        return nll.flatten(1).sum(1).mean() + kl.sum(1).mean()


@torch.no_grad()
def sample_grid(model, zdim, path):
    net = model.module
    net.eval()
    imgs = net.decoder(torch.randn(64, zdim, device="cuda"))
    save_image(imgs.clamp(0, 1), path, nrow=8)
    net.train()


def main():
    args = parse()
    dist.init_process_group("nccl")
    local_rank, rank = int(os.environ["LOCAL_RANK"]), dist.get_rank()
    torch.cuda.set_device(local_rank)
    torch.manual_seed(args.seed + rank)

    ds = AlignedFaces(args.data, size=128)
    sampler = DistributedSampler(ds, seed=args.seed)
    loader = DataLoader(ds, args.batch, sampler=sampler, num_workers=8, pin_memory=True, drop_last=True)
    model = DDP(VAE(args.zdim).cuda(), device_ids=[local_rank])
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)
    if rank == 0:
        os.makedirs(args.out, exist_ok=True)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x in loader:
            loss = model(x.cuda(non_blocking=True))
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            with torch.no_grad():
                model.module.log_sigma.clamp_(min=-6.0)
        if rank == 0:
            print(f"epoch {epoch} elbo {-loss.item():.1f}", flush=True)
            sample_grid(model, args.zdim, os.path.join(args.out, f"{epoch:03d}.png"))
            torch.save(model.module.state_dict(), os.path.join(args.out, "vae.pt"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
