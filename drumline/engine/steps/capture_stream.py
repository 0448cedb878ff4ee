"""Where steps run that are to be captured: CUDA captures what a stream of the program's own is given, never the
default stream, and a step must be captured on the stream that it was warmed up on."""

from __future__ import annotations

import torch

CAPTURING = ("graph", "compiled_graph", "auto")


def is_captured(step: str, device: torch.device) -> bool:
    """Whether this way to step (`train.step`) captures a graph, or may come to it."""
    return device.type == "cuda" and step in CAPTURING


def leave_default_stream(device: torch.device) -> None:
    """From here on this thread gives its work to a stream of its own. Before the model is built and wrapped: autograd
    remembers the stream that a parameter was first used on."""
    if torch.cuda.current_stream(device) == torch.cuda.default_stream(device):
        own = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        own.wait_stream(torch.cuda.default_stream(device))
        torch.cuda.set_stream(own)
