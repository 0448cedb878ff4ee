import os

import torch
import torch.distributed as dist


def start():
    if "LOCAL_RANK" not in os.environ:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


def active():
    return dist.is_available() and dist.is_initialized()


def rank():
    return dist.get_rank() if active() else 0


def sum_(tensor):
    if active():
        dist.all_reduce(tensor)


def finish():
    if active():
        dist.barrier()
        dist.destroy_process_group()
