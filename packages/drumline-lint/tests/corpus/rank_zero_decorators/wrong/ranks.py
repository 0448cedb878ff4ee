"""Who may do what."""

import functools
import os

import torch.distributed as dist


def world_rank():
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else int(os.environ.get("RANK", 0))


def only_on(rank):
    """A decorator: the others get None."""

    def decorate(function):
        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            if world_rank() != rank:
                return None
            return function(*args, **kwargs)

        return wrapper

    return decorate


rank_zero_only = only_on(0)


def lead_first(function):
    """All do it, the lead before the others."""

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        result = None
        if world_rank() == 0:
            result = function(*args, **kwargs)
            dist.barrier()  # <- collective-on-some-ranks
        else:
            result = function(*args, **kwargs)
        return result

    return wrapper
