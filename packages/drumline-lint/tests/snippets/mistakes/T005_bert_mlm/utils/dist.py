import logging
import os

import torch
import torch.distributed as dist


def setup():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    logging.basicConfig(level=logging.INFO if is_main() else logging.WARNING)
    return torch.device("cuda", local_rank)


def is_main():
    return dist.get_rank() == 0


def world_size():
    return dist.get_world_size()


def cleanup():
    dist.barrier()
    dist.destroy_process_group()
