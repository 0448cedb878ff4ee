import os

import torch


def describe():
    lines = []
    for i in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(i)
        lines.append(f"{torch.cuda.get_device_name(i)}: {free / 2**30:.1f}/{total / 2**30:.1f} GiB free")
    return "\n".join(lines)


def restrict_to(gpus):
    """gpus is a comma separated list such as 2,3."""
    os.environ["CUDA_VISIBLE_DEVICES"] = gpus
    return len(gpus.split(","))
