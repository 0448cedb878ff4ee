import torch
import torch.distributed as dist


def init_dist(backend="nccl"):
    dist.init_process_group(backend=backend, init_method="env://")
    return dist.get_rank(), dist.get_world_size()


def reduce_dict(d):
    keys = sorted(d)
    vals = torch.stack([d[k].detach() for k in keys])
    dist.all_reduce(vals)
    vals /= dist.get_world_size()
    return dict(zip(keys, vals.tolist()))
