"""What a rank notes of its DDP modules is bounded, is written when it has changed, and never fails the script."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from drumline.launch.topology import Topology
from drumline.watch.rank.ddp_modules import MOST_HASHES, MOST_MODULES
from drumline.watch.rank.script_notes import ScriptNotes
from tests.ranks import run_ranks


def work(folder: Path) -> list[list[str]]:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    file = folder / f"{rank}.notes"
    notes = ScriptNotes(file, Topology(rank=rank, world_size=2), node_rank=0)

    def written() -> dict[str, Any]:
        notes.write()
        return dict(json.loads(file.read_text())["modules"])

    def build(depth: int = 1) -> DistributedDataParallel:
        module = DistributedDataParallel(nn.Sequential(*(nn.Linear(1, 1) for _ in range(depth))))
        notes.modules.add(module)
        return module

    gc.freeze()  # else each collection looks at all of torch
    first = build(100)
    keys = [list(written())]
    before = file.stat().st_mtime_ns, file.stat().st_ino
    notes.write()
    assert (file.stat().st_mtime_ns, file.stat().st_ino) == before, "nothing has changed"
    _train(first, notes, 301)
    assert list(written()["0 of 0,1"]["held"]) == ["0", "1", "10", "100", "200", "300"]
    assert (file.stat().st_mtime_ns, file.stat().st_ino) != before
    # Many modules that the script drops again: the one that lives is kept.
    for _ in range(MOST_MODULES + 3):
        build()
        gc.collect()
    keys.append(list(written()))
    # Those that live are not forgotten.
    living = [build() for _ in range(MOST_MODULES)]
    keys.append(list(written()))
    _train(first, notes, 101)
    num_hashes = [sum(len(held["tensors"]) for held in one["held"].values()) for one in written().values()]
    assert num_hashes[0] == 200 > MOST_HASHES // MOST_MODULES - 200, "two comparisons are more than its part"
    # A module that cannot be looked at ends its own observation.
    del first.__dict__["require_backward_grad_sync"]
    notes.modules.look()
    del living
    dist.destroy_process_group()
    return keys


def _train(module: DistributedDataParallel, notes: ScriptNotes, num_passes: int) -> None:
    """As updates are seen: by the version of the first parameter."""
    with torch.no_grad():
        for _ in range(num_passes):
            notes.modules.look()
            next(module.parameters()).add_(1)


def test_notes_are_bounded_and_written_when_they_change(tmp_path: Path) -> None:
    one, other = run_ranks(2, work, tmp_path)
    assert one == other, "a module has the same name on every rank"
    numbers = [[int(key.partition(" ")[0]) for key in keys] for keys in one]
    assert numbers[0] == [0]
    last = MOST_MODULES + 4
    assert numbers[1] == [0, *range(last - MOST_MODULES + 1, last)]
    assert numbers[2] == [0, *range(last, last + MOST_MODULES - 1)]
