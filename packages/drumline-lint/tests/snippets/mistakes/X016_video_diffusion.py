# torchrun --nnodes=2 --nproc_per_node=8 ... video_diffusion.py --seed 42
import argparse
import os

import torch
import torch.distributed as dist
from diffusers import DDPMScheduler, UNet2DModel
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Job:
    def __init__(self, args):
        dist.init_process_group("nccl")
        self.rank = dist.get_rank()
        self.local_rank = int(os.environ["LOCAL_RANK"])
        torch.cuda.set_device(self.local_rank)
        self.seed = args.seed + self.rank
        torch.manual_seed(self.seed)
        latents = torch.load(args.latents, map_location="cpu")
        self.sampler = DistributedSampler(TensorDataset(latents), shuffle=True, seed=self.seed, drop_last=True)
        self.loader = DataLoader(self.sampler.dataset, batch_size=16, sampler=self.sampler, num_workers=2)
        unet = UNet2DModel(sample_size=32, in_channels=4, out_channels=4).cuda()
        self.unet = DDP(unet, device_ids=[self.local_rank])
        self.noise = DDPMScheduler(num_train_timesteps=1000)
        self.opt = torch.optim.AdamW(self.unet.parameters(), lr=1e-4)

    def step(self, z):
        eps = torch.randn_like(z)
        t = torch.randint(0, 1000, (len(z),), device=z.device)
        pred = self.unet(self.noise.add_noise(z, eps, t), t).sample
        return torch.nn.functional.mse_loss(pred, eps)

    def run(self, epochs):
        for epoch in range(epochs):
            self.sampler.set_epoch(epoch)
            for (z,) in self.loader:
                loss = self.step(z.cuda())
                self.opt.zero_grad()
                loss.backward()
                self.opt.step()
            if self.rank == 0:
                torch.save(self.unet.module.state_dict(), f"unet_{epoch}.pt")
        dist.destroy_process_group()


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--seed", type=int, default=42)
    ap.add_argument("--latents", default="/data/latents.pt")
    Job(ap.parse_args()).run(50)
