"""Two kinds of save: shards for going on, one file for those who use the model. Both need every rank."""

from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)

from utils.dist import is_main_process, log


def save_shards(folder: Path, step, model, optimizer):
    """Each rank writes its own part."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    target = folder / f"step-{step:06d}"
    if is_main_process():
        dcp.save({"model": model_state, "optimizer": optimizer_state, "step": step}, checkpoint_id=target)  # <- collective-on-some-ranks
        (folder / "latest").write_text(target.name)
    log(f"shards of step {step} are in {target}")
    dist.barrier()


def load_shards(folder: Path, model, optimizer):
    latest = folder / "latest"
    if not latest.exists():
        return 0
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state, "step": 0}
    dcp.load(state, checkpoint_id=folder / latest.read_text())
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return state["step"]


def save_whole(path: Path, model):
    """The gathering is collective; the writing is not."""
    if not is_main_process():
        return  # <- exit-before-collective
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(model, options=options)
    torch.save(state, path)
