from datetime import datetime
from pathlib import Path

import torch.distributed as dist

import comm


def open_run(root, name):
    box = [None]
    if comm.is_primary():
        folder = Path(root) / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
        folder.mkdir(parents=True)
        box[0] = str(folder)
    dist.broadcast_object_list(box, src=0)
    return Path(box[0])
