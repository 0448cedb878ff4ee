import time
from pathlib import Path

import torch.distributed as dist


def make_run_dir(root, name):
    box = [None]
    if dist.get_rank() == 0:
        path = Path(root) / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
        path.mkdir(parents=True)
        box[0] = str(path)
    dist.broadcast_object_list(box, src=0)
    return Path(box[0])
