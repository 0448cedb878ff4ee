"""The process group, and who this process is in it."""

import functools
import os
from datetime import timedelta

import torch
import torch.distributed as dist


def setup_distributed(minutes=10):
    """The device of this process, once the group stands."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", local_rank()) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(minutes=minutes))  # <- group-not-destroyed
    return device


def local_rank():
    return int(os.environ["LOCAL_RANK"])


def is_main_process():
    return dist.get_rank() == 0


def main_process_only(function):
    @functools.wraps(function)
    def wrapped(*args, **kwargs):
        if is_main_process():
            return function(*args, **kwargs)
        return None

    return wrapped


@main_process_only
def log(message):
    print(message, flush=True)


def mean_over_ranks(value):
    value = value.detach().clone()
    dist.all_reduce(value)
    return value / dist.get_world_size()
