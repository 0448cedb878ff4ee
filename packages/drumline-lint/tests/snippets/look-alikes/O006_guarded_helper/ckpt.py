import os

import torch
import torch.distributed as dist


def is_primary():
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0


def save_checkpoint(path, **objects):
    if not is_primary():
        return
    tmp = f"{path}.tmp"
    torch.save({k: v.state_dict() for k, v in objects.items()}, tmp)
    os.replace(tmp, path)


def load_checkpoint(path, device, **objects):
    state = torch.load(path, map_location=device)
    for k, v in objects.items():
        v.load_state_dict(state[k])
