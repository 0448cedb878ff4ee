import torch
import torch.distributed as dist


def global_mean(total, count, device):
    packed = torch.tensor([total, count], dtype=torch.float64, device=device)
    dist.reduce(packed, dst=0)
    return (packed[0] / packed[1]).item()
