"""Helpers around torch.distributed shared by every entry point."""
import os
import random
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist


def is_dist():
    return dist.is_available() and dist.is_initialized()


def get_rank():
    return dist.get_rank() if is_dist() else 0


def get_world_size():
    return dist.get_world_size() if is_dist() else 1


def is_main_process():
    return get_rank() == 0


def init_distributed(timeout_minutes=30):
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)
    dist.init_process_group("nccl", timeout=timedelta(minutes=timeout_minutes), device_id=device)
    return device


def cleanup():
    if is_dist():
        dist.destroy_process_group()


def seed_everything(seed):
    seed = seed + get_rank()
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def barrier():
    if is_dist():
        dist.barrier()


def all_reduce_sum(values, device):
    t = torch.tensor(values, dtype=torch.float64, device=device)
    if is_dist():
        dist.all_reduce(t)
    return t.tolist()


def save_on_master(obj, path):
    if is_main_process():
        torch.save(obj, path)
