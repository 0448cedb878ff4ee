import torch
import torch.nn.functional as F
from torch.distributed.nn.functional import all_gather


def nt_xent(za, zb, tau=0.2):
    za = torch.cat(all_gather(F.normalize(za, dim=1)))
    zb = torch.cat(all_gather(F.normalize(zb, dim=1)))
    z = torch.cat([za, zb])
    n = len(za)
    sim = z @ z.T / tau
    sim.fill_diagonal_(float("-inf"))
    target = torch.arange(2 * n, device=z.device).roll(n)
    return F.cross_entropy(sim, target)
