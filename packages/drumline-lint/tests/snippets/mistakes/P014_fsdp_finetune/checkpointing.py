import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullStateDictConfig, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


def save_model(model, out_dir, step):
    """Write a consolidated checkpoint that from_pretrained can read."""
    policy = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    if dist.get_rank() == 0:
        with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, policy):
            cpu_state = model.state_dict()
        path = os.path.join(out_dir, f"step_{step:07d}.pt")
        os.makedirs(out_dir, exist_ok=True)
        torch.save(cpu_state, path)
        prune(out_dir, keep=3)


def prune(out_dir, keep):
    names = sorted(n for n in os.listdir(out_dir) if n.startswith("step_"))
    for name in names[:-keep]:
        os.remove(os.path.join(out_dir, name))
