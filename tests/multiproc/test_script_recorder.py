"""What a rank reports of its DDP modules is bounded, is written when it has changed, and never
fails the script."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from drumline.base.rank_environment import Topology
from drumline.parallel.scripts.script_recorder import MAX_HASHES, MAX_MODULES, ScriptRecorder
from tests.ranks import run_ranks


def work(folder: Path) -> list[list[str]]:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    file = folder / f"{rank}.script"
    recorder = ScriptRecorder(file, Topology(rank=rank, world_size=2))

    def written() -> dict[str, Any]:
        recorder.write()
        return dict(json.loads(file.read_text())["modules"])

    def build(depth: int = 1) -> DistributedDataParallel:
        module = DistributedDataParallel(nn.Sequential(*(nn.Linear(1, 1) for _ in range(depth))))
        recorder.modules.add(module)
        return module

    gc.freeze()  # else each collection looks at all of torch
    first = build(100)
    keys = [list(written())]
    before = file.stat().st_mtime_ns, file.stat().st_ino
    recorder.write()
    assert (file.stat().st_mtime_ns, file.stat().st_ino) == before, "nothing has changed"
    _train(first, recorder, 301)
    assert list(written()["0 of 0,1"]["hashes"]) == ["0", "1", "10", "100", "200", "300"]
    assert (file.stat().st_mtime_ns, file.stat().st_ino) != before
    # What the script drops again is forgotten, and the one that lives is kept.
    for _ in range(MAX_MODULES + 3):
        build()
        gc.collect()
    keys.append(list(written()))
    # Those that live are not forgotten.
    living = [build() for _ in range(MAX_MODULES)]
    keys.append(list(written()))
    _train(first, recorder, 101)
    num_hashes = [
        sum(len(hashes["tensors"]) for hashes in record["hashes"].values())
        for record in written().values()
    ]
    assert num_hashes[0] == 200 > MAX_HASHES // MAX_MODULES - 200, (
        "two comparisons are more than its part"
    )
    # A module that cannot be looked at ends its own observation.
    del first.__dict__["require_backward_grad_sync"]
    recorder.modules.begin_backward()
    del living
    dist.destroy_process_group()
    return keys


def _train(module: DistributedDataParallel, recorder: ScriptRecorder, num_passes: int) -> None:
    """As updates are seen: by the version of the first parameter."""
    with torch.no_grad():
        for _ in range(num_passes):
            recorder.modules.begin_backward()
            next(module.parameters()).add_(1)


def test_reports_are_bounded_and_written_when_they_change(tmp_path: Path) -> None:
    one, other = run_ranks(2, work, tmp_path)
    assert one == other, "a module has the same name on every rank"
    numbers = [[int(key.partition(" ")[0]) for key in keys] for keys in one]
    assert numbers[0] == [0]
    last = MAX_MODULES + 4
    assert numbers[1] == [0]
    assert numbers[2] == [0, *range(last, last + MAX_MODULES - 1)]
