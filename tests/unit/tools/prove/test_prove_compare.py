"""Two traces: the first difference is found and named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from drumline.base.errors import TrainingError
from drumline.tools.prove.prove import RunDifference, RunTrace, compare, read_trace

BATCH = 4


def start(step: int = 0, world: int = 1, **tensors: str) -> dict[str, Any]:
    return {
        "kind": "start",
        "step": step,
        "world_size": world,
        "pid": 1,
        "tensors": {"w": f"w{step}", "w/exp_avg": f"m{step}"} | tensors,
        "unsaved": {"mask": "same"},
    }


def step(number: int, low: int = 0, high: int = BATCH, **changes: Any) -> dict[str, Any]:
    base = (number - 1) * BATCH
    batch = {
        "low": base + low,
        "high": base + high,
        "indices": [100 + base + place for place in range(low, high)],
        "samples": [f"s{base + place}" for place in range(low, high)],
        "rest": "none",
    }
    line = {"kind": "step", "step": number, "epoch": 0, "batches": [batch]}
    if low == 0:
        line |= {
            "tensors": {"w": f"w{number}", "w/exp_avg": f"m{number}"},
            "unsaved": {"mask": "same"},
        }
    for name, value in changes.items():
        (batch if name in batch else line)[name] = value
    return line


def trace(folder: Path, *ranks: list[dict[str, Any]]) -> RunTrace:
    folder.mkdir(parents=True)
    for rank, lines in enumerate(ranks):
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"rank-{rank:05d}.jsonl").write_text(text)
    return read_trace(folder)


@pytest.fixture(name="reference")
def make_reference(tmp_path: Path) -> RunTrace:
    return trace(tmp_path / "reference", [start(), step(1), step(2), step(3)])


def difference(
    reference: RunTrace, folder: Path, *ranks: list[dict[str, Any]]
) -> RunDifference | None:
    return compare(reference, trace(folder, *ranks)).difference


def evaluated(number: int, loss: float | str = 0.5, **metrics: float) -> dict[str, Any]:
    return {"kind": "evaluated", "step": number, "metrics": {"loss": loss, **metrics}}


def test_what_a_trace_holds(reference: RunTrace) -> None:
    assert (reference.world_size, reference.from_step) == (1, 0)
    assert reference.extent() == "12 samples, 2 tensors"
    assert reference.is_complete(3)
    assert not reference.is_complete(4)


def test_the_same_run_on_any_number_of_ranks(tmp_path: Path, reference: RunTrace) -> None:
    assert difference(reference, tmp_path / "1", [start(), step(1), step(2)]) is None
    halves = [
        [start(world=2), step(1, 0, 2), step(2, 0, 2)],
        [start(world=2), step(1, 2, 4), step(2, 2, 4)],
    ]
    assert difference(reference, tmp_path / "2", *halves) is None
    assert difference(reference, tmp_path / "3", [start(2), step(3)]) is None


def test_the_last_step_of_a_killed_leg_may_lack_a_rank(tmp_path: Path, reference: RunTrace) -> None:
    half = [start(world=2), step(1, 0, 2), step(2, 0, 2)]
    assert difference(reference, tmp_path / "1", half, [start(world=2), step(1, 2, 4)]) is None
    whole = difference(
        reference, tmp_path / "2", half, [start(world=2), step(1, 2, 4), step(2, 3, 4)]
    )
    assert whole is not None
    assert (
        whole.sentence
        == "step 2 has no sample at position 6 of epoch 1, unlike the run without kills"
    )


@pytest.mark.parametrize(
    ("lines", "kind", "at", "sentence"),
    [
        (
            [start(), step(1), step(2, samples=["s4", "x", "s6", "x"], tensors={})],
            "sample",
            2,
            "sample 105 (position 5 of epoch 1) differs at step 2",
        ),
        (
            [start(), step(1, indices=[100, 101, 7, 103])],
            "order",
            1,
            "step 1 took sample 7 at position 2 of epoch 1, not sample 102",
        ),
        ([start(2), step(3, epoch=1)], "order", 3, "step 3 is in epoch 2, not in epoch 1"),
        (
            [start(), step(1), step(2, high=5)],
            "order",
            2,
            "step 2 has a sample at position 8 of epoch 1, unlike the run without kills",
        ),
        (
            [start(), step(1, rest="other")],
            "batch",
            1,
            "the micro-batch of positions 0 to 3 differs at step 1, in what belongs to no single sample",
        ),
        (
            [start(), step(1), step(2, tensors={"w": "w2", "w/exp_avg": "x"})],
            "tensor",
            2,
            "w/exp_avg differs after step 2",
        ),
        (
            [start(), step(1), step(2, tensors={"w": "x"})],
            "tensor",
            2,
            "w differs after step 2, and 1 other tensor with it",
        ),
        ([start(w="x"), step(1)], "tensor", 0, "w differs before the first step"),
        ([start(2, w="x")], "tensor", 2, "w differs as restored from the checkpoint of step 2"),
    ],
)
def test_the_first_difference_is_named(
    tmp_path: Path,
    reference: RunTrace,
    lines: list[dict[str, Any]],
    kind: str,
    at: int,
    sentence: str,
) -> None:
    text = difference(reference, tmp_path / "other", lines)
    assert text is not None
    assert (text.kind, text.step, text.sentence) == (kind, at, sentence)
    assert not text.unsaved


def test_a_buffer_that_is_not_saved_is_no_difference_of_its_own(
    tmp_path: Path, reference: RunTrace
) -> None:
    cache = trace(tmp_path / "1", [start(2) | {"unsaved": {"rope": "empty"}}, step(3)])
    assert compare(reference, cache).difference is None
    assert compare(reference, cache).unsaved == ("mask", "rope")


def test_a_buffer_that_is_not_saved_is_named_with_what_differs(
    tmp_path: Path, reference: RunTrace
) -> None:
    lines = [start() | {"unsaved": {"mask": "same", "rope": "x"}}, step(1)]
    lines += [step(2, unsaved={"mask": "x"}, tensors={"w": "x"}), step(3, unsaved={"later": "x"})]
    text = difference(reference, tmp_path / "other", lines)
    assert text is not None
    assert (text.kind, text.step) == ("tensor", 2)
    assert text.unsaved == ("mask", "rope"), "what differs at that step comes first"


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        (
            evaluated(2, 0.5 + 1e-16),
            "loss of the evaluation after step 2 is 0.5000000000000001, not 0.5",
        ),
        (evaluated(2, "nan"), "loss of the evaluation after step 2 is nan, not 0.5"),
        (evaluated(2, accuracy=1.0), "accuracy of the evaluation after step 2 is 1.0, not missing"),
        (evaluated(2), None),
    ],
)
def test_evaluations_are_compared(
    tmp_path: Path, other: dict[str, Any], sentence: str | None
) -> None:
    whole = trace(
        tmp_path / "whole", [start(), step(1), step(2), evaluated(2), step(3), evaluated(3, "nan")]
    )
    text = difference(
        whole, tmp_path / "other", [start(), step(1), step(2), other, step(3), evaluated(3, "nan")]
    )
    assert (text and (text.kind, text.step, text.sentence)) == (
        sentence and ("evaluation", 2, sentence)
    )
    assert difference(whole, tmp_path / "killed", [start(), step(1), step(2)]) is None


def test_a_stream_has_positions_instead_of_indices(tmp_path: Path) -> None:
    first = trace(tmp_path / "one", [start(), step(1, indices=None)])
    text = difference(
        first, tmp_path / "two", [start(), step(1, indices=None, samples=["s0", "x", "s2", "s3"])]
    )
    assert text is not None
    assert text.sentence == "the sample at position 1 of epoch 1 differs at step 1"


def test_a_run_without_a_trace_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"there is no trace in .*: the run wrote none"):
        read_trace(tmp_path)
