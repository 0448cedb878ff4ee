import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import yaml
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import datasets, transforms as T


class Codebook(nn.Module):
    def __init__(self, k=512, d=64):
        super().__init__()
        self.register_buffer("weight", torch.randn(k, d))
        self.register_buffer("usage", torch.zeros(k))

    def forward(self, z):
        flat = z.permute(0, 2, 3, 1).reshape(-1, z.size(1))
        idx = torch.cdist(flat, self.weight).argmin(1)
        if self.training:
            self.usage += torch.bincount(idx, minlength=len(self.weight))
        q = self.weight[idx].view(z.size(0), z.size(2), z.size(3), -1).permute(0, 3, 1, 2)
        return z + (q - z).detach(), F.mse_loss(z, q.detach()), flat.detach()

    @torch.no_grad()
    def revive(self, samples):
        dist.all_reduce(self.usage)
        dead = self.usage < 1
        fresh = samples[torch.randint(len(samples), (len(self.weight),), device=samples.device)]
        self.weight[dead] = fresh[dead]
        dist.broadcast(self.weight, src=0)
        self.usage.zero_()


class VQVAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.Sequential(nn.Conv2d(3, 64, 4, 2, 1), nn.ReLU(), nn.Conv2d(64, 64, 4, 2, 1))
        self.book = Codebook()
        self.dec = nn.Sequential(nn.ConvTranspose2d(64, 64, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(64, 3, 4, 2, 1))

    def forward(self, x):
        q, commit, flat = self.book(self.enc(x))
        return self.dec(q), commit, flat


def main(cfg):
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    ds = datasets.ImageFolder(cfg["data"], T.Compose([T.Resize(128), T.CenterCrop(128), T.ToTensor()]))
    sampler = DistributedSampler(ds, drop_last=True)
    loader = DataLoader(ds, cfg["batch"], sampler=sampler, num_workers=4, drop_last=True)
    torch.manual_seed(cfg["seed"])
    model = DDP(VQVAE().cuda(), device_ids=[local_rank], broadcast_buffers=False)
    opt = torch.optim.Adam(model.parameters(), cfg["lr"])

    step = 0
    for epoch in range(cfg["epochs"]):
        sampler.set_epoch(epoch)
        for x, _ in loader:
            x = x.cuda(non_blocking=True)
            rec, commit, flat = model(x)
            loss = F.mse_loss(rec, x) + 0.25 * commit
            opt.zero_grad()
            loss.backward()
            opt.step()
            step += 1
            if cfg["revive_every"] and step % cfg["revive_every"] == 0:
                model.module.book.revive(flat)
            if dist.get_rank() == 0 and step % 100 == 0:
                print(step, loss.item())
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), cfg["out"])
    dist.destroy_process_group()


if __name__ == "__main__":
    main(yaml.safe_load(open("vqvae.yaml")))  # torchrun
