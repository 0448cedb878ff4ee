import torch
import torch.distributed as dist
import torch.nn.functional as F


def all_gather_ragged(t):
    """Concatenate tensors that differ in their first dimension."""
    world = dist.get_world_size()
    size = torch.tensor([t.size(0)], device=t.device)
    sizes = [torch.empty_like(size) for _ in range(world)]
    dist.all_gather(sizes, size)
    sizes = [int(s) for s in sizes]
    longest = max(sizes)
    pad = [0, 0] * (t.dim() - 1) + [0, longest - t.size(0)]
    padded = F.pad(t, pad).contiguous()
    parts = [torch.empty_like(padded) for _ in range(world)]
    dist.all_gather(parts, padded)
    return torch.cat([p[:n] for p, n in zip(parts, sizes)])
