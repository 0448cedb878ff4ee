"""Before the first step: are these ranks about to run the same job? A difference lists the value per rank.

Ranks that differ train on happily: weights drift apart, or a collective waits for ever. Here it costs one gather of a
few bytes; the values themselves travel only when they differ.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import blake3
import torch
from torch import nn

from drumline.distributed.collectives import gather_json, gather_tensors
from drumline.distributed.tensor_hash import hash_tensors
from drumline.errors import PreflightError
from drumline.text import by_rank


def check_same(values: Mapping[str, Any], *, host: str, device: torch.device, next_step: str) -> None:
    """Collective: raise on every rank if any of these (JSON) values differs between ranks."""
    digest = blake3.blake3(json.dumps(values, sort_keys=True).encode()).digest(16)
    digests = gather_tensors(torch.frombuffer(bytearray(digest), dtype=torch.uint8), device=device)
    if all(torch.equal(one, digests[0]) for one in digests):
        return
    everyone = gather_json({"host": host, "values": dict(values)}, device=device)
    hosts = [one["host"] for one in everyone]
    for name in dict.fromkeys(name for one in everyone for name in one["values"]):
        found = [one["values"].get(name) for one in everyone]
        if any(value != found[0] for value in found):
            raise PreflightError(f"ranks differ in {name}: {by_rank(found, hosts)}", next_step=next_step)


def check_same_weights(model: nn.Module, *, host: str, device: torch.device) -> None:
    """Collective: raise on every rank if the models do not start from the same bits, naming the first difference."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    next_step = "build the model after the seed is set and from the same settings on every rank"
    check_same(
        {"the model's tensors": {name: list(tensor.shape) for name, tensor in tensors.items()}},
        host=host,
        device=device,
        next_step=next_step,
    )
    digests = gather_tensors(hash_tensors(list(tensors.values()), device), device=device)
    for position, name in enumerate(tensors):
        found = [int(one[position]) for one in digests]
        if any(value != found[0] for value in found):
            hosts = gather_json(host, device=device)
            shown = [f"{value & (2**64 - 1):016x}" for value in found]
            raise PreflightError(
                f"ranks start from different weights; first difference in {name}: {by_rank(shown, hosts)}",
                next_step=next_step,
            )
