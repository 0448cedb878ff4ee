import copy
import os
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from diffusers import DDPMScheduler, UNet2DModel
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import datasets, transforms


@dataclass
class Config:
    root: str = "data/flowers"
    ckpt: str = "ddpm_last.pt"
    size: int = 64
    batch: int = 32
    epochs: int = 400
    lr: float = 1e-4
    decay: float = 0.9995
    seed: int = 0


class DiffusionTrainer:
    def __init__(self, cfg, local_rank):
        self.cfg, self.device = cfg, torch.device("cuda", local_rank)
        self.net = UNet2DModel(cfg.size, 3, 3, block_out_channels=(128, 256, 256, 512)).to(self.device)
        self.ema = copy.deepcopy(self.net).eval().requires_grad_(False)
        self.opt = torch.optim.AdamW(self.net.parameters(), lr=cfg.lr)
        self.start = self.resume()
        self.ddp = DDP(self.net, device_ids=[local_rank])
        self.noise = DDPMScheduler(num_train_timesteps=1000)

    def resume(self):
        if not Path(self.cfg.ckpt).exists():
            return 0
        state = torch.load(self.cfg.ckpt, map_location=self.device, weights_only=True)
        self.net.load_state_dict(state["net"])
        self.opt.load_state_dict(state["opt"])
        return state["epoch"] + 1

    def save(self, epoch):
        if dist.get_rank() == 0:
            torch.save({"net": self.net.state_dict(), "opt": self.opt.state_dict(), "epoch": epoch}, self.cfg.ckpt)
            self.ema.save_pretrained(f"ema/epoch{epoch:04d}")

    @torch.no_grad()
    def update_ema(self):
        for e, p in zip(self.ema.parameters(), self.net.parameters()):
            e.lerp_(p, 1 - self.cfg.decay)

    def fit(self):
        tf = transforms.Compose([transforms.Resize((self.cfg.size,) * 2), transforms.RandomHorizontalFlip(),
                                 transforms.ToTensor(), transforms.Normalize(0.5, 0.5)])
        data = datasets.ImageFolder(self.cfg.root, tf)
        sampler = DistributedSampler(data)
        loader = DataLoader(data, self.cfg.batch, sampler=sampler, num_workers=4, drop_last=True)
        for epoch in range(self.start, self.cfg.epochs):
            sampler.set_epoch(epoch)
            for x, _ in loader:
                x = x.to(self.device, non_blocking=True)
                eps = torch.randn_like(x)
                t = torch.randint(0, 1000, (len(x),), device=self.device)
                loss = F.mse_loss(self.ddp(self.noise.add_noise(x, eps, t), t).sample, eps)
                self.opt.zero_grad(set_to_none=True)
                loss.backward()
                self.opt.step()
                self.update_ema()
            self.save(epoch)


def main(cfg=Config()):
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    torch.manual_seed(cfg.seed + dist.get_rank())
    DiffusionTrainer(cfg, local_rank).fit()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
