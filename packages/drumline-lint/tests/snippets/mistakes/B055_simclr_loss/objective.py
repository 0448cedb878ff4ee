import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


class NTXent(nn.Module):
    def __init__(self, temperature=0.2):
        super().__init__()
        self.t = temperature

    @staticmethod
    def gather(z):
        out = [torch.zeros_like(z) for _ in range(dist.get_world_size())]
        dist.all_gather(out, z)
        return torch.cat(out)

    def forward(self, za, zb):
        za, zb = self.gather(F.normalize(za, dim=1)), self.gather(F.normalize(zb, dim=1))
        n = len(za)
        z = torch.cat([za, zb])
        sim = z @ z.T / self.t
        sim.fill_diagonal_(float("-inf"))
        target = torch.arange(2 * n, device=z.device).roll(n)
        return F.cross_entropy(sim, target)
