import torch
import torch.distributed as dist

import comm


def epoch_mean(total, count, device):
    """Mean over all processes; only the primary process gets it, the others get None."""
    t = torch.tensor([total, count], dtype=torch.float64, device=device)
    dist.reduce(t, dst=0)
    return (t[0] / t[1]).item() if comm.is_primary() else None
