"""Process group helpers, in the spirit of a small comm.py."""
import functools
import os

import torch
import torch.distributed as dist


def setup():
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    torch.cuda.set_device(local_rank)
    dist.init_process_group(backend="nccl", device_id=torch.device("cuda", local_rank))
    return local_rank


def teardown():
    if dist.is_initialized():
        dist.destroy_process_group()


def rank():
    return dist.get_rank() if dist.is_initialized() else 0


def world_size():
    return dist.get_world_size() if dist.is_initialized() else 1


def is_primary():
    return rank() == 0


def synchronize():
    if world_size() > 1:
        dist.barrier()


def master_only(fn):
    @functools.wraps(fn)
    def wrapped(*args, **kwargs):
        if is_primary():
            return fn(*args, **kwargs)
        return None

    return wrapped


def reduce_dict(d, device):
    """Average a dict of python floats over all processes, same result everywhere."""
    if world_size() == 1:
        return dict(d)
    keys = sorted(d)
    t = torch.tensor([float(d[k]) for k in keys], device=device)
    dist.all_reduce(t)
    t /= world_size()
    return dict(zip(keys, t.tolist()))
