"""Which cause is named for which difference."""

from __future__ import annotations

import pytest

from drumline.tools.prove.prove import Kind, RunDifference, lost_in_the_kill, not_repeatable


def found(kind: Kind, *, step: int = 5, unsaved: tuple[str, ...] = ()) -> RunDifference:
    return RunDifference(kind, step, "it differs", "the thing", unsaved)


@pytest.mark.parametrize(
    ("difference", "what", "next_step"),
    [
        (
            found("sample"),
            "unseeded randomness in the dataset: the thing is not the same twice",
            "seeded for every sample",
        ),
        (found("batch"), "unseeded randomness in the dataset: the thing", "global generators"),
        (found("order"), "the dataset is not the same twice", "len(dataset)"),
        (
            found("tensor", step=0),
            "unseeded randomness in model(): the thing starts from different",
            "torch's",
        ),
        (
            found("tensor"),
            "a non-deterministic kernel, or randomness in the model",
            "--train.deterministic",
        ),
        (found("file"), "a non-deterministic kernel", "--train.deterministic"),
        (
            found("evaluation"),
            "a non-deterministic kernel, or randomness in evaluation that is not from the global generators of torch, "
            "numpy or random: the weights are the same twice, but the thing is not",
            "--train.deterministic",
        ),
    ],
)
def test_not_the_same_twice(difference: RunDifference, what: str, next_step: str) -> None:
    cause = not_repeatable(difference)
    assert cause.what.startswith(what)
    assert next_step in cause.next_step


@pytest.mark.parametrize(
    ("difference", "worlds", "what", "next_step"),
    [
        (found("sample"), (2, 2), "state outside the checkpoint, in the dataset", "index"),
        (found("sample"), (2, 3), "state outside the checkpoint, in the dataset", "index"),
        (
            found("sample"),
            (2, 2),
            "state outside the checkpoint, in the dataset",
            "state_dict() and load_state_dict() must hold everything that decides the next sample",
        ),
        (
            found("sample", unsaved=("mask",)),
            (2, 2),
            "state outside the checkpoint, in the dataset",
            "index",
        ),
        (found("order"), (2, 2), "the dataset changed between the legs", "len(dataset)"),
        (found("order"), (2, 2), "the dataset changed", "end at the same sample"),
        (
            found("evaluation"),
            (2, 2),
            "state outside the checkpoint, used in evaluation: without kills",
            "keep what evaluation depends on",
        ),
        (
            found("evaluation", unsaved=("mask",)),
            (2, 2),
            "state outside the checkpoint, used in evaluation: the buffer mask has persistent=False",
            "without persistent=False",
        ),
        (
            found("evaluation"),
            (4, 2),
            "arithmetic that depends on the number of ranks (4 and 2), or state outside the checkpoint, used in",
            "--world 4 first",
        ),
        (
            found("tensor"),
            (2, 2),
            "state outside the checkpoint, in the model, the task",
            "register_buffer",
        ),
        (
            found("file"),
            (2, 2),
            "state outside the checkpoint, in the model, the task",
            "register_buffer",
        ),
        (
            found("tensor", unsaved=("mask",)),
            (2, 2),
            "state outside the checkpoint: the buffer mask has persistent=False",
            "without persistent=False",
        ),
        (
            found("tensor"),
            (4, 2),
            "arithmetic that depends on the number of ranks (4 and 2)",
            "--world 4 first",
        ),
    ],
)
def test_lost_in_the_kill(
    difference: RunDifference, worlds: tuple[int, int], what: str, next_step: str
) -> None:
    cause = lost_in_the_kill(difference, worlds=worlds)
    assert cause.what.startswith(what)
    assert next_step in cause.next_step
