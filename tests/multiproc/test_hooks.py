"""Hooks in a run: when each is called, how one ends the run on all ranks, and what a failing one
leaves."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from drumline.base.errors import CheckpointError, UsageError
from drumline.checkpoint import store
from drumline.config.schema import CheckpointConfig, Config, DistConfig
from drumline.report.goodput import Goodput
from drumline.report.page import facts_of
from drumline.report.run_data import read_run
from drumline.report.run_list import listed
from drumline.runs.events import read_events
from tests.hooked_jobs import (
    Failing,
    FailsInASchedule,
    Hooked,
    Recorded,
    Recorder,
    Stopped,
    Thawed,
    Unsavable,
)
from tests.jobs import assert_same_bits, make_config, newest, train_here
from tests.multiproc.test_resume import EVERY_STEP, interrupted_at
from tests.ranks import RanksFailed, run_ranks


def events_of(run: Path, kind: str, rank: int = 0) -> list[dict[str, Any]]:
    return [
        event
        for event in read_events(run / "events" / f"rank-{rank:05d}.jsonl")
        if event["kind"] == kind
    ]


def test_every_moment_comes_in_the_order_of_the_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an evaluation in reverse; at the end the last checkpoint is complete, however slow the
    disk is."""
    Recorder.records.clear()
    write = store.write
    monkeypatch.setattr(
        store, "write", lambda *given, **named: (time.sleep(0.2), write(*given, **named))[1]
    )
    config = make_config(epochs=1, checkpoint=CheckpointConfig(every_steps=4))
    train_here(config, Recorded, tmp_path)
    names = ("first", "second")
    assert Recorder.records == [
        ("first", "start", 0),
        ("second", "start", 0),
        ("first", "after_step", 2),
        ("first", "after_step", 4),
        ("second", "after_step", 4),
        *((name, moment, 4) for moment in ("before_save", "after_save") for name in names),
        *((name, "before_evaluation", 5) for name in names),
        *((name, "after_evaluation", 5) for name in reversed(names)),
        *((name, moment, 5) for moment in ("before_save", "after_save", "end") for name in names),
    ]
    logged = events_of(tmp_path, "logged")
    (evaluation,) = events_of(tmp_path, "evaluation")
    expected = {"step": 5, "name": "accuracy", "type": "scalar", "value": evaluation["accuracy"]}
    assert [{name: event[name] for name in expected} for event in logged] == [expected] * 2
    assert events_of(tmp_path, "end")[0]["stopped"] is None

    # A finished run that is started again is evaluated again, and nothing else.
    Recorder.records.clear()
    train_here(config, Recorded, tmp_path)
    assert [moment for name, moment, _ in Recorder.records if name == "first"] == [
        "start", "before_evaluation", "after_evaluation", "end"
    ]  # fmt: skip


def test_one_rank_asks_to_stop_and_all_end_after_the_next_log_line_also_after_a_kill(
    tmp_path: Path,
) -> None:
    """Asked after step 3, killed before the log line of step 4."""
    config = make_config(checkpoint=EVERY_STEP)
    reason = "rank 1 has seen enough"
    whole = run_ranks(2, train_here, config, Stopped, tmp_path / "whole")
    interrupted_at(3, 2, config, Stopped, tmp_path)
    ends = run_ranks(2, train_here, config, Stopped, tmp_path)
    for end in (*whole, *ends):
        assert (end.step, end.stopped) == (4, {"reason": reason, "unit": "epochs", "length": 2})
    assert_same_bits(newest(tmp_path), newest(tmp_path / "whole"))
    assert [event["step"] for event in events_of(tmp_path, "evaluation")] == [4], (
        "as at the end of any run"
    )
    assert [event["stopped"] for rank in (0, 1) for event in events_of(tmp_path, "end", rank)] == [
        reason
    ] * 2
    assert newest(tmp_path).documents["progress"]["step"] == 4

    # Started again it has finished, on any number of ranks, until it is made longer.
    assert train_here(config, Stopped, tmp_path).step == 4
    (note,) = (event["message"] for event in events_of(tmp_path, "note"))
    assert note == (
        f"this run was stopped at step 4 ({reason}); raise train.epochs or train.steps, or start a new one with --fresh"
    )
    assert [event["total_steps"] for event in events_of(tmp_path, "start")] == [10, 10, 10]
    listed_run = listed(tmp_path)
    assert (listed_run.step, listed_run.total_steps, listed_run.stopped) == (4, 10, reason)
    facts = facts_of(read_run(tmp_path), Goodput(seconds={"training": 0.0, "evaluation": 0.0}))
    assert (facts["steps"], facts["stopped"]) == ("4 of 10", reason)
    with pytest.raises(
        UsageError, match=r"has finished at step 4, and was trained with other settings: optim\.lr"
    ):
        train_here(replace(config, optim=replace(config.optim, lr=0.5)), Stopped, tmp_path)
    with pytest.raises(
        UsageError, match=r"has finished at step 4, .* train\.batch_size 8 -> 4"
    ):  # more steps, same epochs
        train_here(make_config(batch_size=4, checkpoint=EVERY_STEP), Stopped, tmp_path)
    longer = train_here(make_config(epochs=3, checkpoint=EVERY_STEP), Stopped, tmp_path)
    assert (longer.step, longer.stopped) == (15, None)


def test_a_failing_hook_is_named_and_only_its_rank_hears_of_the_failure(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(2, train_here, make_config(), Failing, tmp_path)
    assert (
        "ValueError: the disk is full of bees\nin the hook Fails.after_step()"
        in caught.value.errors[1]
    )
    (error,) = events_of(tmp_path, "error", rank=1)
    assert (
        error["message"] == "ValueError: the disk is full of bees (in the hook Fails.after_step())"
    )
    assert [path.name for path in tmp_path.glob("failed-*")] == ["failed-1"]
    assert (tmp_path / "failed-1").read_text() == "2 the disk is full of bees"
    (warning,) = events_of(tmp_path, "warning", rank=1)
    assert warning["message"] == "the hook Fails.failure() failed: OSError: and now the network"


def test_a_hook_that_only_hears_of_failures_knows_the_moment_and_may_log(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such step"):
        train_here(make_config(), FailsInASchedule, tmp_path)
    (logged,) = events_of(tmp_path, "logged")
    assert (logged["step"], logged["value"]) == (
        7,
        "no such step at 7 of epoch 2 with ['loss', 'accuracy']",
    )


def test_a_state_that_cannot_be_saved_is_refused_before_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"the hook KeepsTheModel\.state_dict\(\): 0/model cannot be saved"
    ):
        train_here(make_config(), Unsavable, tmp_path)
    assert not events_of(tmp_path, "train")


def at_step(run: Path, step: int) -> store.Snapshot:
    return store.read(run / "checkpoints" / f"step-{step:08d}")


@pytest.mark.parametrize(("world_size", "exact"), [(1, "world"), (2, "elastic")])
def test_unfrozen_parameters_are_left_alone_until_their_step(
    tmp_path: Path, world_size: int, exact: str
) -> None:
    config = frozen_config(exact)
    run_ranks(world_size, train_here, config, Thawed, tmp_path / "whole")
    first, before, after = (at_step(tmp_path / "whole", step) for step in (1, 4, 5))
    for name in ("0.weight", "0.bias"):
        assert torch.equal(first.tensors["model"][name], before.tensors["model"][name])
        assert not torch.equal(before.tensors["model"][name], after.tensors["model"][name])
        assert not [key for key in before.tensors["optimizer"] if key.startswith(name)]
        assert after.tensors["optimizer"][f"{name}/step"] == 1, "its own count of steps begins here"
    assert not torch.equal(first.tensors["model"]["3.weight"], before.tensors["model"]["3.weight"])
    if world_size == 2 and exact == "world":
        interrupted_at(3, world_size, config, Thawed, tmp_path / "killed")
        run_ranks(world_size, train_here, config, Thawed, tmp_path / "killed")
        assert_same_bits(newest(tmp_path / "killed"), newest(tmp_path / "whole"))


def frozen_config(exact: str) -> Config:
    config = make_config(checkpoint=EVERY_STEP, exact=exact)
    optim = replace(config.optim, name="adamw", weight_decay=0.1)
    return replace(config, optim=optim, dist=DistConfig(find_unused_parameters=True))


def test_a_stop_that_comes_with_the_last_step_is_no_stop(tmp_path: Path) -> None:
    """The second evaluation is the last one here: the run ends as it would have, and can be made
    longer."""
    progress = train_here(make_config(), Hooked, tmp_path)
    assert (progress.step, progress.stopped) == (10, None)
    saved = newest(tmp_path).documents["progress"]
    assert (saved["stopped"], saved["stop_asked"]) == (None, None)
