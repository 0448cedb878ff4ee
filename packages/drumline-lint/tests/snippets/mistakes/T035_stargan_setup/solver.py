import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from torchvision.datasets import ImageFolder
from torchvision.transforms import Compose, Normalize, RandomHorizontalFlip, Resize, ToTensor

from dist_utils import reduce_dict
from networks import Critic, Translator


class Solver:
    def __init__(self, cfg):
        self.cfg = cfg
        self.device = torch.device("cuda")
        self.G = DistributedDataParallel(Translator(cfg.domains).to(self.device))
        self.D = DistributedDataParallel(Critic(cfg.domains).to(self.device))
        self.opt_g = torch.optim.Adam(self.G.parameters(), cfg.lr, betas=(0.0, 0.99))
        self.opt_d = torch.optim.Adam(self.D.parameters(), cfg.lr, betas=(0.0, 0.99))
        ds = ImageFolder(cfg.data, Compose([Resize((128, 128)), RandomHorizontalFlip(), ToTensor(),
                                            Normalize([0.5] * 3, [0.5] * 3)]))
        self.sampler = DistributedSampler(ds, cfg.world_size, cfg.rank, drop_last=True)
        self.loader = DataLoader(ds, cfg.batch, sampler=self.sampler, num_workers=4, drop_last=True)

    def d_step(self, x, y, y_trg):
        with torch.no_grad():
            fake = self.G(x, y_trg)
        out = self.D(torch.cat([x, fake]), torch.cat([y, y_trg]))
        real_s, fake_s = out.chunk(2)
        loss = F.softplus(-real_s).mean() + F.softplus(fake_s).mean()
        self.opt_d.zero_grad()
        loss.backward()
        self.opt_d.step()
        return loss

    def g_step(self, x, y, y_trg):
        fake = self.G(x, y_trg)
        self.D.requires_grad_(False)
        adv = F.softplus(-self.D.module(fake, y_trg)).mean()
        self.D.requires_grad_(True)
        loss = adv + self.cfg.lambda_id * F.l1_loss(fake, x)
        self.opt_g.zero_grad()
        loss.backward()
        self.opt_g.step()
        return loss

    def run(self):
        for epoch in range(self.cfg.epochs):
            self.sampler.set_epoch(epoch)
            for x, y in self.loader:
                x, y = x.to(self.device), y.to(self.device)
                y_trg = torch.randint_like(y, self.cfg.domains)
                logs = reduce_dict({"d": self.d_step(x, y, y_trg), "g": self.g_step(x, y, y_trg)})
            if self.cfg.rank == 0:
                print(epoch, logs)
                os.makedirs(self.cfg.out, exist_ok=True)
                torch.save(self.G.module.state_dict(), os.path.join(self.cfg.out, f"G{epoch}.pt"))
        dist.destroy_process_group()
