"""Ranks as torchrun gives them."""

import os
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Ranks:
    rank: int
    local_rank: int
    world_size: int
    node: int

    @classmethod
    def from_environment(cls):
        return cls(
            rank=int(os.environ["RANK"]),
            local_rank=int(os.environ["LOCAL_RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
            node=int(os.environ.get("GROUP_RANK", 0)),
        )


def setup_distributed():
    ranks = Ranks.from_environment()
    if torch.cuda.is_available():
        torch.cuda.set_device(ranks.local_rank)
        device = torch.device("cuda", ranks.local_rank)
    else:
        device = torch.device("cpu")
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method="env://")  # <- init-without-timeout
    return ranks, device


def is_main_process():
    return not dist.is_initialized() or dist.get_rank() == 0


@contextmanager
def main_process_first():
    """The main process does it, the others wait and then do it, too."""
    if not is_main_process():
        dist.barrier()
    yield
    if is_main_process():
        dist.barrier()


def print_once(*args):
    if is_main_process():
        print(*args, flush=True)
