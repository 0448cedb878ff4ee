import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from diffusion.data import ImageFolderFlat
from diffusion.unet import UNetModel


class DDPM(nn.Module):
    def __init__(self, timesteps=1000):
        super().__init__()
        self.net = UNetModel(channels=128, mults=(1, 2, 2, 4))
        betas = torch.linspace(1e-4, 0.02, timesteps)
        self.register_buffer("abar", torch.cumprod(1.0 - betas, 0))
        self.timesteps = timesteps

    def forward(self, x, t):
        return self.net(x, t)

    def p_losses(self, x0):
        t = torch.randint(0, self.timesteps, (x0.size(0),), device=x0.device)
        noise = torch.randn_like(x0)
        a = self.abar[t].view(-1, 1, 1, 1)
        return F.mse_loss(self(a.sqrt() * x0 + (1 - a).sqrt() * noise, t), noise)


class Trainer:
    def __init__(self, folder, steps=300_000, bs=16):
        self.local_rank = int(os.environ["LOCAL_RANK"])
        torch.cuda.set_device(self.local_rank)
        dist.init_process_group("nccl")
        torch.manual_seed(100 + dist.get_rank())
        self.ds = ImageFolderFlat(folder, size=64)
        self.sampler = DistributedSampler(self.ds, drop_last=True)
        self.dl = DataLoader(self.ds, bs, sampler=self.sampler, num_workers=6, pin_memory=True)
        self.model = DDP(DDPM().cuda(), device_ids=[self.local_rank])
        self.opt = torch.optim.Adam(self.model.parameters(), lr=8e-5, betas=(0.9, 0.99))
        self.steps = steps

    def cycle(self):
        epoch = 0
        while True:
            self.sampler.set_epoch(epoch)
            yield from self.dl
            epoch += 1

    def train(self):
        data = self.cycle()
        for step in range(1, self.steps + 1):
            x = next(data).cuda(non_blocking=True)
            loss = self.model.module.p_losses(x)
            loss.backward()
            self.opt.step()
            self.opt.zero_grad(set_to_none=True)
            if dist.get_rank() == 0 and step % 1000 == 0:
                print(f"{step}: {loss.item():.4f}")
                torch.save(self.model.module.state_dict(), "results/ddpm.pt")
        dist.destroy_process_group()


if __name__ == "__main__":
    Trainer("/data/ffhq64").train()
