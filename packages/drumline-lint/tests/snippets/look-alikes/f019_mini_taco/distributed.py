import os

import torch
import torch.distributed as dist


def setup():
    """Join the group started by torchrun and bind this process to its GPU."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")


def is_main():
    return dist.get_rank() == 0


def cleanup():
    dist.barrier()
    dist.destroy_process_group()
