"""Everything that touches the run folder. Call these on every process."""
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist

_folder = None


def open_run(folder):
    global _folder
    _folder = Path(folder)
    if dist.get_rank() == 0:
        _folder.mkdir(parents=True, exist_ok=True)
    dist.barrier()


def save(name, obj):
    if dist.get_rank() == 0:
        tmp = _folder / f".{name}"
        torch.save(obj, tmp)
        os.replace(tmp, _folder / name)
    dist.barrier()


def load(name, device):
    path = _folder / name
    return torch.load(path, map_location=device) if path.exists() else None


def log(**values):
    if dist.get_rank():
        return
    with open(_folder / "log.jsonl", "a") as fh:
        fh.write(json.dumps(values) + "\n")
