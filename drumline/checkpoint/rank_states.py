"""State that may differ from rank to rank (a position in a stream): every rank's is saved, each
gets its own back.

It is small as a rule, but may hold tensors of any shape, which differ between ranks: they travel as
the bytes of a safetensors file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import safetensors.torch
import torch
from blake3 import blake3
from torch import Tensor

from drumline.checkpoint import tensor_file
from drumline.checkpoint.optimizer_state import decode_state
from drumline.rank.collectives import broadcast_tensors, gather_json, gather_on_main
from drumline.rank.tensor_hash import hash_tensors


def gather_states(
    document: Any, tensors: Mapping[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Collective: from this rank's encoded state (`encode_state`), a document with those of all
    ranks and, on rank 0 alone, their tensors, which may be large."""
    file = bytearray(b"".join(tensor_file.stream(tensors)))
    everyone = gather_json([document, len(file)])
    sizes = [size for _, size in everyone]
    files = gather_on_main(torch.frombuffer(file, dtype=torch.uint8), sizes)

    gathered = {}
    for rank, received in enumerate(files):
        of_rank = safetensors.torch.load(received.numpy().tobytes())
        for name, tensor in of_rank.items():
            gathered[f"{rank}/{name}"] = tensor

    return {"ranks": [document for document, _ in everyone]}, gathered


def is_same_everywhere(
    document: Any,
    tensors: Mapping[str, Tensor],
    *,
    device: torch.device,
) -> bool:
    """Collective: whether all ranks have the same encoded state, to the bit."""
    digest = blake3(json.dumps([document, list(tensors)]).encode()).hexdigest()
    hashes = hash_tensors(list(tensors.values()), device).tolist()
    everyone = gather_json([digest, *hashes])
    return all(digests == everyone[0] for digests in everyone)


def state_of_rank(document: Mapping[str, Any], tensors: Mapping[str, Tensor], rank: int) -> Any:
    """The state that was saved for this rank, or for all of them. A rank that the saved world did
    not have is given another's."""
    saved = min(rank, len(document["ranks"]) - 1)
    return decode_state(document["ranks"][saved], lambda name: tensors[f"{saved}/{name}"].clone())


def sent_state(
    documents: Mapping[int, Any], rank: int | None, tensors: Mapping[str, Tensor] | None
) -> Any:
    """Collective: the state of a saved rank, which may differ from rank to rank; None: of none. Rank
    0 has the tensors of all, and sends them for one after the other: together they may need more
    memory than there is."""
    state = None
    for saved_rank, document in documents.items():
        prefix = f"{saved_rank}/"
        of_rank = None
        if tensors is not None:
            of_rank = {name: tensor for name, tensor in tensors.items() if name.startswith(prefix)}

        received = broadcast_tensors(of_rank)
        if saved_rank == rank:
            named = {name.removeprefix(prefix): tensor for name, tensor in received.items()}
            state = decode_state(document, named.__getitem__)

    return state
