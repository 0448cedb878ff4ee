import os
from datetime import datetime

import torch.distributed as dist


def new_run(base):
    """A folder name common to all processes, made once."""
    box = [None]
    if dist.get_rank() == 0:
        name = os.path.join(base, datetime.now().strftime("%Y%m%d-%H%M%S"))
        os.makedirs(name)
        box[0] = name
    dist.broadcast_object_list(box, src=0)
    return box[0]
