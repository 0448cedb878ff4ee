import torch
import torch.distributed as dist


@torch.no_grad()
def evaluate(net, loader, dev):
    if dist.get_rank() != 0:
        return None
    net.eval()
    hit = torch.zeros(2, device=dev)
    for u, i, y in loader:
        pred = net(u.to(dev), i.to(dev)) > 0
        hit[0] += (pred == (y.to(dev) > 0.5)).sum()
        hit[1] += y.numel()
    dist.all_reduce(hit)
    return (hit[0] / hit[1]).item()
