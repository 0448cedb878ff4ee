"""A spot notice on one node: all ranks save and exit as after a signal, and preempted.json has the
reason."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from drumline.base.errors import ExitCode
from drumline.config.schema import CheckpointConfig, Config
from drumline.runs import catalog
from drumline.runs.events import read_events
from drumline.training import run as engine
from drumline.training.between_steps import preemption as preempting
from drumline.training.between_steps import spot_notice
from drumline.training.between_steps.preemption import Preemption
from drumline.training.between_steps.saver import Saver
from drumline.training.between_steps.spot_notice import make_probe
from drumline.training.job.job import Progress, make_manager
from drumline.training.loop import Loop
from drumline.training.run_context import RunRequest
from tests.jobs import Classify, make_config
from tests.ranks import run_ranks

PROBE = """
import pathlib
def ask():
    pathlib.Path({folder!r}, "asked").touch()
    if not pathlib.Path({folder!r}, "leave").exists():
        raise OSError("no such service")
    return "a reclaim at noon"
"""


def noticed(config: Config, run: Path) -> tuple[int, int]:
    """Train as one rank; the notice is there from step 5 on. A SIGTERM follows it, which is no
    second word."""
    preemption = Preemption()
    progress = Progress()
    ddp = make_manager(config)
    take_step = Loop.take_step

    def slowly(self: Loop, *args: Any) -> None:
        time.sleep(0.03)
        take_step(self, *args)
        if self.progress.step == 5 and ddp.rank == ddp.world_size - 1:
            (run.parent / "leave").touch()

    save_step = Saver.save_step

    def save_late(self: Saver, *args: Any, **options: Any) -> None:
        if progress.is_stopping:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.2)
        save_step(self, *args, **options)

    Loop.take_step = slowly
    Saver.save_step = save_late
    preempting.SAME_SIGNAL_S = -1.0  # a second signal would end it at once
    spot_notice.make_probe = lambda notice: (make_probe(notice)[0], 0.05)
    preemption.listen(prints=ddp.rank == 0)
    ddp.setup()
    preemption.join(ddp, progress)
    code = engine.TrainingRun(
        RunRequest("test", config, run, False, ("test",)), Classify, ddp, progress, preemption
    ).train()
    preemption.close()
    ddp.cleanup()
    return code, progress.step


@pytest.mark.parametrize("world_size", [2, 1])
def test_a_notice_is_a_reason_to_save_and_leave(tmp_path: Path, world_size: int) -> None:
    run = tmp_path / "run"
    notice = str(tmp_path / "leave")
    if world_size == 1:
        (tmp_path / "my_own_probe.py").write_text(PROBE.format(folder=str(tmp_path)))
        notice = f"{tmp_path}/my_own_probe.py:ask"
    config = make_config(
        steps=2000, checkpoint=CheckpointConfig(every_epochs=0), eval_every_epochs=1000
    )
    config = replace(config, watch=replace(config.watch, notice=notice))
    ends = run_ranks(world_size, noticed, config, run)
    assert {code for code, _ in ends} == {ExitCode.PREEMPTED}
    (step,) = {step for _, step in ends}
    assert 5 <= step < 2000
    marker = json.loads((run / "preempted.json").read_text())
    said = f"a notice at {notice}" if world_size == 2 else f"{notice}: a reclaim at noon"
    assert (marker["step"], marker["signal"], marker["rank"]) == (step, said, 0)
    assert (
        catalog.newest_valid(run / "checkpoints").path == run / "checkpoints" / f"step-{step:08d}"
    )
    events = list(read_events(run / "events" / "rank-00000.jsonl"))
    assert (events[-1]["kind"], events[-1]["signal"]) == ("preempted", said)
    log = (run / "logs" / "rank-00000.log").read_text()
    assert f"preempted by {said} (seen by rank 0 on " in log
    warnings = [event["message"] for event in events if event["kind"] == "warning"]
    assert warnings == (
        []
        if world_size == 2
        else [
            f"watch.notice {notice} failed: OSError: no such service; retrying every 0.05 s without another warning"
        ]
    )
