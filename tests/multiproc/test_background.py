"""Checkpoints written while training continues: the same bits, one at a time, nothing lost when
something fails."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from drumline.base.errors import CheckpointError
from drumline.checkpoint import store
from drumline.config.schema import CheckpointConfig
from drumline.report.verify.run_check import verify_run
from drumline.runs import catalog
from drumline.runs.events import JsonLines, read_events
from drumline.training.tasks.base import Loss
from tests.hooked_jobs import HookedNormalised
from tests.jobs import Classify, assert_same_bits, make_config, newest, train_here, train_on

EVERY_STEP = CheckpointConfig(every_steps=1, every_epochs=0, keep_last=50, keep_best=0)


class Breaks(Classify):
    """Fails in the middle of the fourth step."""

    best_metric = "loss"
    higher_is_better = False
    calls = 0

    def eval_data(self) -> Any:
        return None

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        # of the passes before the first step only the count of FLOPs trains
        type(self).calls += model.training
        if self.calls == 5:
            raise ZeroDivisionError("the fourth step")
        return super().loss(model, batch)


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    return [
        event for event in read_events(run / "events" / "rank-00000.jsonl") if event["kind"] == kind
    ]


def problems(run: Path) -> list[str]:
    return [str(problem) for problem in verify_run(run, lambda text: None).problems]


def slow_down(monkeypatch: pytest.MonkeyPatch, hold: Callable[[int], object]) -> None:
    """Hold up the writer's thread before it writes a step."""
    write = store.write

    def write_late(root: Path, step: int, **content: Any) -> Path:
        hold(step)
        return write(root, step, **content)

    monkeypatch.setattr(store, "write", write_late)


def test_the_bits_are_those_of_saves_that_the_step_waits_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_here(
        make_config(checkpoint=replace(EVERY_STEP, background=False)),
        HookedNormalised,
        tmp_path / "waits",
    )
    # Each is written only when later steps have changed the model, but for those that the next save
    # waits for.
    slow_down(monkeypatch, lambda step: time.sleep(0.02))
    config = make_config(checkpoint=replace(EVERY_STEP, every_steps=3))
    train_here(config, HookedNormalised, tmp_path / "beside")
    for step in (3, 6, 9, 10):
        name = Path("checkpoints") / f"step-{step:08d}"
        waited = store.read(tmp_path / "waits" / name)
        beside = store.read(tmp_path / "beside" / name)
        waited.documents["progress"].pop("facts"), beside.documents["progress"].pop("facts")
        assert_same_bits(waited, beside)
    for run, copies, steps in (
        ("waits", {"none"}, range(1, 11)),
        ("beside", {"host"}, (3, 6, 9, 10)),
    ):
        saved = events(tmp_path / run, "checkpoint")
        assert [event["step"] for event in saved] == list(steps)
        assert {event["copy"] for event in saved} == copies
        assert all(event["blocked_s"] > 0 for event in saved)
        assert problems(tmp_path / run) == []
    assert all(
        event["blocked_s"] >= event["seconds"] for event in events(tmp_path / "waits", "checkpoint")
    )
    assert all(
        event["blocked_s"] < event["seconds"]
        for event in events(tmp_path / "beside", "checkpoint")[:1]
    )


def test_a_checkpoint_is_reported_when_it_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some steps later: after the log lines of those, and without turning back what later events
    say."""
    begun = threading.Event()

    def hold(step: int) -> None:
        if step == 1:
            begun.wait()

    slow_down(monkeypatch, hold)

    class Frees(Breaks):
        calls = -1000

        def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
            # in the sixth step, after five and the pass that counts FLOPs
            if type(self).calls == -994:
                begun.set()
            return super().loss(model, batch)

    config = make_config(steps=9, checkpoint=replace(EVERY_STEP, every_steps=1, when_busy="skip"))
    train_here(config, Frees, tmp_path)
    saved = [event["step"] for event in events(tmp_path, "checkpoint")]
    assert saved[0] == 1
    assert saved[-1] == 9
    notes = [(event["step"], event["message"]) for event in events(tmp_path, "note")]
    for step in (2, 3, 4, 5):
        assert step not in saved
        message = f"skipped the save of step {step}: step 1 is still being written"
        assert (step, message) in notes
    assert catalog.list_steps(tmp_path / "checkpoints") == saved
    order = [(e["kind"], e["step"]) for e in read_events(tmp_path / "events" / "rank-00000.jsonl")]
    assert order.index(("checkpoint", 1)) > order.index(("train", 4))
    assert problems(tmp_path) == []


def test_the_ledger_is_on_the_disk_before_the_checkpoint_and_no_step_waits_for_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flush = JsonLines.flush
    seen = []

    def flush_and_note(lines: JsonLines) -> None:
        flush(lines)
        seen.append((threading.current_thread().name, catalog.list_steps(tmp_path / "checkpoints")))

    monkeypatch.setattr(JsonLines, "flush", flush_and_note)
    train_here(make_config(steps=2, checkpoint=EVERY_STEP), Classify, tmp_path)
    assert seen == [("drumline-checkpoint", []), ("drumline-checkpoint", [1])]


def test_the_best_and_the_last_are_not_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_down(monkeypatch, lambda step: time.sleep(0.3))
    config = make_config(epochs=1, checkpoint=replace(EVERY_STEP, when_busy="skip", every_epochs=1))
    config = replace(config, train=replace(config.train, epochs=None, steps=7))
    train_here(config, Classify, tmp_path)
    saved = [event["step"] for event in events(tmp_path, "checkpoint")]
    assert 5 in saved  # the end of the epoch, where the first evaluation is the best
    assert 7 in saved
    assert len(saved) < 7


def test_an_error_elsewhere_waits_for_the_checkpoint_in_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Breaks.calls = 0
    slow_down(monkeypatch, lambda step: time.sleep(0.3))
    with pytest.raises(ZeroDivisionError, match="the fourth step"):
        train_here(make_config(checkpoint=replace(EVERY_STEP, every_steps=3)), Breaks, tmp_path)
    assert [event["step"] for event in events(tmp_path, "checkpoint")] == [3]
    assert catalog.verify(tmp_path / "checkpoints" / "step-00000003").step == 3


def test_an_error_of_the_writer_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Breaks.calls = 0

    def fail_late(step: int) -> None:
        time.sleep(0.5)
        raise CheckpointError("the disk of the test is full")

    slow_down(monkeypatch, fail_late)
    with pytest.raises(ZeroDivisionError, match="the fourth step"):
        train_here(make_config(checkpoint=replace(EVERY_STEP, every_steps=3)), Breaks, tmp_path)
    assert [event["message"] for event in events(tmp_path, "warning")] == [
        "the disk of the test is full"
    ]


@pytest.mark.parametrize("every_steps", [1, 0], ids=["in-between", "at-the-end"])
def test_a_checkpoint_that_cannot_be_written_ends_the_run(tmp_path: Path, every_steps: int) -> None:
    in_the_way = tmp_path / "checkpoints" / f"step-{every_steps or 100:08d}"
    in_the_way.parent.mkdir()
    in_the_way.write_text("mine")
    config = make_config(steps=100, checkpoint=replace(EVERY_STEP, every_steps=every_steps))
    config = replace(config, log=replace(config.log, every_steps=100))
    with pytest.raises(
        CheckpointError, match=r"could not be saved: a file is where a folder should be"
    ) as caught:
        train_here(config, Classify, tmp_path)
    assert f"try: move away {in_the_way}" in str(caught.value)
    (told,) = events(tmp_path, "error")
    assert told["step"] in ((1, 2) if every_steps else (100,))


def test_two_ranks_write_a_share_each(tmp_path: Path) -> None:
    config = make_config(epochs=1, checkpoint=replace(EVERY_STEP, every_steps=4))
    shared = replace(
        config, checkpoint=replace(config.checkpoint, writers="ranks", when_busy="skip")
    )
    assert train_on(2, shared, HookedNormalised, tmp_path / "parts").step == 5
    assert train_on(2, config, HookedNormalised, tmp_path / "whole").step == 5
    parts = newest(tmp_path / "parts")
    whole = newest(tmp_path / "whole")
    for snapshot in (parts, whole):
        snapshot.documents["progress"].pop("facts")
    assert_same_bits(parts, whole)
    files = catalog.verify(tmp_path / "parts" / "checkpoints" / "step-00000005").files
    names = ("model", "optimizer", "hooks")
    assert {f"{name}-part-0000{rank}.safetensors" for name in names for rank in (0, 1)} <= set(
        files
    )
    assert problems(tmp_path / "parts") == []
    # On one rank it has no effect, and what two have written is read.
    longer = replace(shared, train=replace(shared.train, epochs=None, steps=6))
    train_here(longer, HookedNormalised, tmp_path / "parts")
    assert (
        "model.safetensors"
        in catalog.verify(tmp_path / "parts" / "checkpoints" / "step-00000006").files
    )
    assert problems(tmp_path / "parts") == []
