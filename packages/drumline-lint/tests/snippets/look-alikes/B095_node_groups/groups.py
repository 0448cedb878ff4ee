import os

import torch.distributed as dist


def node_group():
    """The group of all ranks on this node."""
    per_node = int(os.environ["LOCAL_WORLD_SIZE"])
    world, rank = dist.get_world_size(), dist.get_rank()
    mine = None
    for start in range(0, world, per_node):
        ranks = list(range(start, start + per_node))
        group = dist.new_group(ranks)
        if rank in ranks:
            mine = group
    return mine
