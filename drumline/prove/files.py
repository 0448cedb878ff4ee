"""The last checkpoints of two runs, compared file by file and bit by bit."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from drumline.prove.compare import Difference

# The manifest has the time of the save; what the facts in progress.json say of the world may differ.
MANIFEST, PROGRESS, RANDOM = "manifest.json", "progress.json", "rng.safetensors"


def compare_checkpoints(reference: Path, other: Path, step: int, *, same_world: bool) -> Difference | None:
    """Between the folders of one step. `same_world`: the random state of every rank is to be the same too."""
    names = {file.name for folder in (reference, other) for file in folder.iterdir()}
    for name in sorted(names - {MANIFEST} - (set() if same_world else {RANDOM})):
        one, two = (_read(folder / name) for folder in (reference, other))
        if one != two:
            what = f"{name} of the checkpoint of step {step}"
            inner = _inside(one, two, name)
            return Difference("file", step, f"{what} differs{inner and f', first in {inner}'}", inner or name)
    return None


def _read(file: Path) -> bytes | None:
    if not file.exists():
        return None
    if file.name != PROGRESS:
        return file.read_bytes()
    progress = json.loads(file.read_bytes())
    return json.dumps([progress["step"], progress["cursor"]]).encode()


def _inside(one: bytes | None, two: bytes | None, name: str) -> str:
    """The first tensor in which two files differ, where they are of that kind."""
    if one is None or two is None or not name.endswith(".safetensors"):
        return ""
    first, second = _tensors(one), _tensors(two)
    return next((key for key in {**first, **second} if first.get(key) != second.get(key)), "")


def _tensors(raw: bytes) -> dict[str, Any]:
    """Type, shape and bytes of every tensor: bytes, since no two NaN are equal."""
    length = int.from_bytes(raw[:8], "little")
    entries: Mapping[str, Any] = json.loads(raw[8 : 8 + length])
    data = memoryview(raw)[8 + length :]  # a view: a checkpoint may be large
    return {
        name: (entry["dtype"], entry["shape"], data[slice(*entry["data_offsets"])])
        for name, entry in entries.items()
        if name != "__metadata__"
    }
