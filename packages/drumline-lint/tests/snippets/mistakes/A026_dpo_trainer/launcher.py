import os

import torch
import torch.distributed as dist


def setup():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    torch.manual_seed(dist.get_rank())
    return device


def teardown():
    dist.destroy_process_group()
