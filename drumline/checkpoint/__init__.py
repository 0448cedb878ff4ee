"""Room 7 of the house: what is saved (`state`, `rng`), how it survives (`store`) and which ones stay (`retention`)."""

from __future__ import annotations

from drumline.checkpoint.load import load_checkpoint

__all__ = ["load_checkpoint"]
