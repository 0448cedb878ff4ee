"""What steps that are to be captured need before anything else is made: a stream, and ranks that may differ.

CUDA captures what a stream of the program's own is given, never the default stream, and a step must be captured on the
stream that it was warmed up on.
"""

from __future__ import annotations

from collections.abc import MutableMapping

import torch

_CAPTURING = ("graph", "compiled_graph", "auto")


def is_captured(step: str, device: torch.device) -> bool:
    """Whether this way to step (`train.step`) captures a graph, or may come to it."""
    return device.type == "cuda" and step in _CAPTURING


def let_ranks_differ(step: str, environment: MutableMapping[str, str]) -> None:
    """Before the ranks meet. NCCL would register the buffers of a captured collective, which all ranks must then do in
    the same one; but batches of another shape, or a capture that fails, are one rank's own affair."""
    if step in _CAPTURING:
        environment.setdefault("NCCL_GRAPH_REGISTER", "0")


def leave_default_stream(device: torch.device) -> None:
    """From here on this thread gives its work to a stream of its own. Before the model is built and wrapped: autograd
    remembers the stream that a parameter was first used on."""
    if torch.cuda.current_stream(device) == torch.cuda.default_stream(device):
        own = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        own.wait_stream(torch.cuda.default_stream(device))
        torch.cuda.set_stream(own)
