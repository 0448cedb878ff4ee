"""At which backward passes the parameters of a DDP module are compared."""

from __future__ import annotations

import weakref

from torch import nn

from drumline.parallel.scripts.script_recorder import _ObservedModule


def steps(versions: list[int], alone: set[int] = frozenset()) -> list[int]:  # type: ignore[assignment]
    """Given the number of changes of a parameter at each pass; `alone`: passes in no_sync."""
    module = _ObservedModule("0 of 0,1", "Net", (0, 1), weakref.ref(nn.Linear(1, 1)))
    steps_of_passes = [
        module.next_step(version, is_no_sync=place in alone)
        for place, version in enumerate(versions)
    ]
    return [step for step in steps_of_passes if step is not None]


def test_by_updates_not_by_passes() -> None:
    assert steps(list(range(301))) == [1, 10, 100, 200, 300]
    assert steps([place // 4 for place in range(401)]) == [1, 10, 100], (
        "gradients of four passes are one update"
    )
    assert steps([3 * place for place in range(101)]) == [1, 10, 100], (
        "however many changes make up an update"
    )
    assert steps([7, *range(100, 111)]) == [1, 10], (
        "what came before the first pass, a checkpoint say, is no update"
    )


def test_ranks_that_train_alone_for_a_while_are_not_compared() -> None:
    assert steps(list(range(301)), alone={4}) == [1]
    assert steps([place // 2 for place in range(30)], alone=set(range(0, 30, 2))) == [1, 10], (
        "gradients accumulate"
    )
