import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from vae.data import CelebA
from vae.model import VAE


class VAETrainer:
    def __init__(self, args):
        self.args = args
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.device = torch.device("cuda", self.local_rank)
        vae = VAE(latent=256).to(self.device)
        self.model = DDP(vae, device_ids=[self.local_rank])
        self.opt = torch.optim.Adam(self.model.parameters(), lr=args["lr"])
        ds = CelebA(args["root"])
        self.sampler = DistributedSampler(ds, shuffle=True)
        self.loader = DataLoader(ds, args["bs"], sampler=self.sampler,
                                 num_workers=4, drop_last=True)

    def loss(self, x):
        recon, mu, logvar = self.model.module(x)
        rec = torch.nn.functional.binary_cross_entropy(recon, x, reduction="sum")
        kl = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
        return (rec + self.args["beta"] * kl) / x.size(0)

    def train(self):
        for epoch in range(self.args["epochs"]):
            self.sampler.set_epoch(epoch)
            self.model.train()
            for x in self.loader:
                x = x.to(self.device, non_blocking=True)
                loss = self.loss(x)
                self.opt.zero_grad()
                loss.backward()
                self.opt.step()
            if dist.get_rank() == 0:
                print(f"epoch {epoch}: {loss.item():.2f}")
                torch.save(self.model.module.state_dict(), self.args["ckpt"])


def main():
    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    VAETrainer(dict(root="/data/celeba", bs=128, lr=1e-3, beta=1.0,
                    epochs=50, ckpt="vae.pt")).train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
