import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import transforms
from torchvision.datasets import CelebA
from torchvision.utils import save_image

T = 1000
BETAS = torch.linspace(1e-4, 0.02, T)
ALPHA_BAR = torch.cumprod(1 - BETAS, 0)


class Denoiser(nn.Module):
    def __init__(self, w=96):
        super().__init__()
        self.t = nn.Sequential(nn.Embedding(T, w), nn.Linear(w, w), nn.SiLU())
        self.inp = nn.Conv2d(3, w, 3, padding=1)
        self.mid = nn.ModuleList(nn.Sequential(nn.GroupNorm(8, w), nn.SiLU(), nn.Conv2d(w, w, 3, padding=1))
                                 for _ in range(8))
        self.out = nn.Conv2d(w, 3, 3, padding=1)

    def forward(self, x, t):
        h = self.inp(x) + self.t(t)[:, :, None, None]
        for m in self.mid:
            h = h + m(h)
        return self.out(h)


@torch.no_grad()
def sample(net, n=16):
    net.eval()
    x = torch.randn(n, 3, 64, 64, device="cuda")
    for t in reversed(range(T)):
        eps = net(x, torch.full((n,), t, device="cuda"))
        a, ab = 1 - BETAS[t].item(), ALPHA_BAR[t].item()
        x = (x - (1 - a) / (1 - ab) ** 0.5 * eps) / a ** 0.5
        if t:
            x = x + BETAS[t].item() ** 0.5 * torch.randn_like(x)
    net.train()
    return x


def main():
    dist.init_process_group("nccl")
    rank, local = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    torch.manual_seed(100 + rank)

    tf = transforms.Compose([transforms.CenterCrop(148), transforms.Resize(64), transforms.ToTensor(),
                             transforms.Normalize([0.5] * 3, [0.5] * 3)])
    ds = CelebA("/data", split="train", transform=tf)
    sampler = DistributedSampler(ds)
    loader = DataLoader(ds, 64, sampler=sampler, num_workers=6, drop_last=True)
    model = DDP(Denoiser().cuda(), device_ids=[local])
    opt = torch.optim.AdamW(model.parameters(), 2e-4)
    ab = ALPHA_BAR.cuda()

    for epoch in range(100):
        sampler.set_epoch(epoch)
        for x, _ in loader:
            x = x.cuda(non_blocking=True)
            t = torch.randint(0, T, (len(x),), device="cuda")
            eps = torch.randn_like(x)
            a = ab[t][:, None, None, None]
            loss = F.mse_loss(model(a.sqrt() * x + (1 - a).sqrt() * eps, t), eps)
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0:
            save_image(sample(model.module) / 2 + 0.5, f"samples_{epoch:03d}.png", nrow=4)
            torch.save(model.module.state_dict(), "ddpm.pt")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
