"""State that may differ from rank to rank (a position in a stream): every rank's is saved, each
gets its own back.

It is small as a rule, but may hold tensors of any shape, which differ between ranks: they travel as
bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from blake3 import blake3
from torch import Tensor

from drumline.checkpoint.optimizer_state import decode_state
from drumline.rank.collectives import broadcast_tensors, gather_json, gather_on_main
from drumline.rank.tensor_hash import hash_tensors


def gather_states(
    document: Any, tensors: Mapping[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Collective: from this rank's encoded state (`encode_state`), a document with those of all
    ranks and, on rank 0 alone, their tensors, which may be large."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    shapes = {
        name: [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), tensor.nbytes]
        for name, tensor in tensors.items()
    }
    pieces = [tensor.reshape(-1).view(torch.uint8) for tensor in tensors.values()]
    content = torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.uint8)
    everyone = gather_json([document, shapes, content.numel()])
    contents = gather_on_main(content, [size for _, _, size in everyone])
    gathered = {}
    for rank, ((_, shapes_of_rank, _), received) in enumerate(
        zip(everyone, contents, strict=False)
    ):
        start = 0
        for name, (dtype, shape, size) in shapes_of_rank.items():
            piece = received[start : start + size].clone()
            gathered[f"{rank}/{name}"] = piece.view(getattr(torch, dtype)).reshape(shape)
            start += size
    return {"ranks": [document for document, _, _ in everyone]}, gathered


def is_same_everywhere(
    document: Any, tensors: Mapping[str, Tensor], *, device: torch.device
) -> bool:
    """Collective: whether all ranks have the same encoded state, to the bit."""
    digest = blake3(json.dumps([document, list(tensors)]).encode()).hexdigest()
    everyone = gather_json([digest, *hash_tensors(list(tensors.values()), device).tolist()])
    return all(digests == everyone[0] for digests in everyone)


def state_of_rank(document: Mapping[str, Any], tensors: Mapping[str, Tensor], rank: int) -> Any:
    """The state that was saved for this rank, or for all of them. A rank that the saved world did
    not have is given another's."""
    saved = min(rank, len(document["ranks"]) - 1)
    return decode_state(document["ranks"][saved], lambda name: tensors[f"{saved}/{name}"].clone())


def sent_state(document: Any, rank: int, tensors: Mapping[str, Tensor] | None) -> Any:
    """Collective: the state of a saved rank, whose tensors rank 0 has."""
    prefix = f"{rank}/"
    of_rank = None
    if tensors is not None:
        of_rank = {name: tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    received = broadcast_tensors(of_rank)
    return decode_state(document, lambda name: received[f"{prefix}{name}"])
