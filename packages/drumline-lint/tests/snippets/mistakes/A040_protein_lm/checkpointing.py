import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullStateDictConfig, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


def save(path, model, optimizer, epoch):
    cfg = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, cfg):
        weights = model.state_dict()
    if dist.get_rank() == 0:
        torch.save({"model": weights, "optimizer": optimizer.state_dict(), "epoch": epoch}, path)
    dist.barrier()


def load(path, model, optimizer):
    blob = torch.load(path, map_location="cpu", weights_only=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        model.load_state_dict(blob["model"])
    optimizer.load_state_dict(blob["optimizer"])
    return blob["epoch"] + 1
