"""Who this process is. Everything that asks for a rank asks here."""

import functools
import logging
import os
from datetime import timedelta

import torch
import torch.distributed as dist


class Environment:
    """What the launcher said."""

    def __init__(self):
        self.rank = int(os.environ["RANK"])
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.world_size = int(os.environ["WORLD_SIZE"])

    @property
    def is_master(self):
        return self.rank == 0

    @property
    def cuda(self):
        return torch.cuda.is_available()

    @property
    def device(self):
        return torch.device("cuda", self.local_rank) if self.cuda else torch.device("cpu")

    def __enter__(self):
        if self.cuda:
            torch.cuda.set_device(self.local_rank)
        dist.init_process_group("nccl" if self.cuda else "gloo", timeout=timedelta(minutes=10))
        return self

    def __exit__(self, kind, error, trace):
        dist.destroy_process_group()
        return False


def rank_zero_only(function):
    """Other ranks do nothing and get None."""

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        if int(os.environ.get("RANK", 0)) != 0:
            return None
        return function(*args, **kwargs)

    return wrapper


def get_logger(name):
    logger = logging.getLogger(name)
    for level in ("debug", "info", "warning", "error"):
        setattr(logger, level, rank_zero_only(getattr(logger, level)))
    return logger
