"""The state of a dataset that keeps its own place: every rank's goes into the checkpoint, and comes back to that rank.

It is small as a rule, but may hold tensors of any shape, which differ between ranks: they travel as bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from drumline.checkpoint.nested import decode, encode
from drumline.checkpoint.store import Snapshot
from drumline.distributed.collectives import gather_json, gather_tensors
from drumline.engine.job import Job

FILE = "data"


def gather_data_state(job: Job) -> Snapshot:
    """Collective: what a checkpoint holds of the dataset's own state; nothing for a dataset that has none."""
    state = job.loader.state_dict()
    if state is None:
        return Snapshot({}, {})
    tensors: dict[str, Tensor] = {}
    document = encode(state, "the state_dict() of the training data", tensors)
    packed = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    shapes = {name: [str(one.dtype).removeprefix("torch."), list(one.shape)] for name, one in packed.items()}
    everyone = gather_json([document, shapes], device=job.ddp.device)
    contents = _gather_bytes(packed, job)
    found = {
        f"{rank}/{name}": tensor
        for rank, (_, described) in enumerate(everyone)
        for name, tensor in _unpacked(contents[rank], described).items()
    }
    documents = {FILE: {"ranks": [document for document, _ in everyone], "has_tensors": bool(found)}}
    return Snapshot({FILE: found} if found else {}, documents)


def tensor_files(documents: Mapping[str, Any]) -> list[str]:
    """The files of tensors that a checkpoint with these documents has for the dataset's state."""
    return [FILE] if documents.get(FILE, {}).get("has_tensors") else []


def restore_data_state(job: Job, snapshot: Snapshot) -> None:
    """Put this rank's dataset back to where the checkpoint was taken."""
    if FILE not in snapshot.documents:
        return
    states = snapshot.documents[FILE]["ranks"]
    # A rank that the saved world did not have is given another's, which the loader refuses, as every rank's then does.
    rank = min(job.ddp.rank, len(states) - 1)
    state = decode(states[rank], lambda name: snapshot.tensors[FILE][f"{rank}/{name}"].clone())
    job.loader.load_state_dict(state)


def _gather_bytes(tensors: Mapping[str, Tensor], job: Job) -> list[Tensor]:
    pieces = [tensor.reshape(-1).view(torch.uint8) for tensor in tensors.values()]
    mine = torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.uint8)
    sizes = gather_json(mine.numel(), device=job.ddp.device)
    if not max(sizes):
        return [mine] * len(sizes)
    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    padded[: mine.numel()] = mine
    return gather_tensors(padded, device=job.ddp.device)


def _unpacked(content: Tensor, shapes: Mapping[str, tuple[str, list[int]]]) -> dict[str, Tensor]:
    tensors, start = {}, 0
    for name, (dtype, shape) in shapes.items():
        tensor = torch.empty(shape, dtype=getattr(torch, dtype))
        size = tensor.numel() * tensor.element_size()
        tensor.reshape(-1).view(torch.uint8).copy_(content[start : start + size])
        tensors[name] = tensor
        start += size
    return tensors
