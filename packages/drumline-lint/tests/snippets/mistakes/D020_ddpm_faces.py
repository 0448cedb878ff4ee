"""Unconditional DDPM on face crops."""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from ddpm.data import FaceCrops
from ddpm.unet import UNet2D

T = 1000


class Schedule:
    def __init__(self, device):
        betas = torch.linspace(1e-4, 0.02, T, device=device)
        self.abar = torch.cumprod(1 - betas, 0)

    def noisy(self, x0, t, eps):
        a = self.abar[t].view(-1, 1, 1, 1)
        return a.sqrt() * x0 + (1 - a).sqrt() * eps


class EMA:
    def __init__(self, net, decay=0.9999):
        self.decay = decay
        self.shadow = {k: v.detach().clone() for k, v in net.state_dict().items()}

    @torch.no_grad()
    def update(self, net):
        for k, v in net.state_dict().items():
            if v.dtype.is_floating_point:
                self.shadow[k].lerp_(v, 1 - self.decay)


def main():
    dist.init_process_group("nccl")
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    device = torch.device("cuda", local)
    torch.manual_seed(77)

    faces = FaceCrops("/data/faces128")
    sampler = DistributedSampler(faces, shuffle=True, drop_last=True)
    loader = DataLoader(faces, batch_size=32, sampler=sampler, num_workers=6, drop_last=True)

    model = DDP(UNet2D(base=128).to(device), device_ids=[local])
    ema = EMA(model.module)
    opt = torch.optim.Adam(model.parameters(), lr=1e-4)
    schedule = Schedule(device)
    rng = torch.Generator(device=device)
    rng.manual_seed(77)

    for epoch in range(400):
        sampler.set_epoch(epoch)
        for x0 in loader:
            x0 = x0.to(device, non_blocking=True)
            t = torch.randint(0, T, (len(x0),), device=device, generator=rng)
            eps = torch.randn(x0.shape, device=device, generator=rng)
            loss = F.mse_loss(model(schedule.noisy(x0, t, eps), t), eps)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            ema.update(model.module)
        if dist.get_rank() == 0:
            print(f"epoch {epoch} mse {loss.item():.4f}", flush=True)
            torch.save({"net": model.module.state_dict(), "ema": ema.shadow}, "ddpm.pt")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
