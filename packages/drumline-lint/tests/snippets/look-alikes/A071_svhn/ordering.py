from contextlib import contextmanager

import torch.distributed as dist


@contextmanager
def local_zero_first(local_rank):
    """Let local rank 0 of each node run the block before the other local ranks."""
    if local_rank != 0:
        dist.barrier()
    yield
    if local_rank == 0:
        dist.barrier()
