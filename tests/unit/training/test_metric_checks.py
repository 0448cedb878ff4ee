"""What metrics() may return, and what becomes of what they compute."""

from __future__ import annotations

import functools
import re
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from drumline.base.errors import TrainingError, UsageError
from drumline.training.job.evaluation_job import (
    compute_metrics,
    make_metrics,
    numbers,
    update_metrics,
)

ALONE: Any = SimpleNamespace(
    world_size=1, rank=0, device=torch.device("cpu"), is_main_process=lambda: True
)
ONE_OF_TWO: Any = SimpleNamespace(world_size=2, rank=0, device=torch.device("cpu"))


def task_with(**metrics: Any) -> Any:
    return SimpleNamespace(metrics=lambda: metrics)


@functools.cache
def whole_state() -> Any:
    """A class of metrics that torchmetrics refuses to merge. To load torchmetrics takes seconds, in
    every process that collects tests."""
    from torchmetrics import Metric

    class WholeState(Metric):
        full_state_update: bool = True

        def update(self) -> None: ...

        def compute(self) -> int:
            return 1

    return WholeState


def test_what_lacks_a_method_is_refused_with_its_name() -> None:
    sentence = "the metric 'f1' has no reset and no metric_state and no merge_state"
    with pytest.raises(UsageError, match=re.escape(sentence)):
        make_metrics(task_with(f1=type("F1", (), {"update": 1, "compute": 1})()), ALONE)


def test_a_reserved_name_is_refused_before_the_first_step() -> None:
    with pytest.raises(TrainingError, match="the metric name 'samples' is reserved"):
        make_metrics(task_with(samples=Recorder()), ALONE)


def test_what_cannot_be_merged_is_refused_on_several_ranks_alone() -> None:
    metric = whole_state()()
    metric.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")
    assert make_metrics(task_with(whole=metric), ALONE) == {"whole": metric}
    with pytest.raises(
        UsageError, match=r"the metric 'whole' cannot be merged over ranks: ``merge_state`` is not"
    ):
        make_metrics(task_with(whole=metric), ONE_OF_TWO)


def own_merge(metric: Any, state: Any) -> None:
    """As one may write it: without updates there is nothing to concatenate, which is an error."""
    torch.cat([])


@pytest.mark.parametrize(
    ("reduction", "problem"),
    [
        ("mean", "its value is a mean, of which merge_state does not know the weight"),
        (None, "its value has no dist_reduce_fx"),
        ("sum", None),
    ],
)
def test_what_torchmetrics_would_merge_wrongly_is_refused(
    reduction: str | None, problem: str | None
) -> None:
    part_state = type("PartState", (whole_state(),), {"full_state_update": False})
    with_own_merge = type("OwnMerge", (part_state,), {"merge_state": own_merge})
    for kind in (part_state, with_own_merge):
        metric = kind()
        metric.add_state("value", torch.tensor(0.0), dist_reduce_fx=reduction)
        if problem is None or kind is with_own_merge:
            make_metrics(task_with(part=metric), ONE_OF_TWO)
            continue
        with pytest.raises(
            UsageError, match=f"the metric 'part' cannot be merged over ranks: {problem}"
        ):
            make_metrics(task_with(part=metric), ONE_OF_TWO)


@pytest.mark.soak
def test_the_trial_of_a_merge_leaves_nothing_behind() -> None:
    from torchmetrics.aggregation import SumMetric

    metric = SumMetric()
    make_metrics(task_with(total=metric), ONE_OF_TWO)
    assert (metric.sync_on_compute, metric._to_sync) == (False, False)
    metric.update(torch.tensor([1.0, 2.0]))
    assert metric.compute() == 3


def test_a_collection_has_no_groups_and_its_members_are_checked_by_name() -> None:
    from torchmetrics import MetricCollection
    from torchmetrics.aggregation import SumMetric

    whole = whole_state()()
    whole.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")
    members = {"first": SumMetric(), "second": SumMetric()}
    made = make_metrics(task_with(both=MetricCollection(members, prefix="my-")), ONE_OF_TWO)
    update_metrics(made, torch.tensor([1.0, 2.0]))
    assert compute_metrics(made, ALONE, is_updated=True) == {
        "both/my-first": 3.0,
        "both/my-second": 3.0,
    }
    collection: Any = made["both"]
    assert collection.compute_groups == {}
    with pytest.raises(UsageError, match="the metric 'both/whole' cannot be merged over ranks"):
        make_metrics(task_with(both=MetricCollection({"whole": whole})), ONE_OF_TWO)


class Recorder:
    """Computes what it was updated with."""

    metric_state: ClassVar[dict[str, Tensor]] = {}

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def update(self, *outputs: Any, **named: Any) -> None:
        self.value = (outputs, named)

    def compute(self) -> Any:
        return self.value

    def reset(self) -> None: ...

    def merge_state(self, state: Any) -> None: ...


def test_outputs_are_given_as_they_are_returned() -> None:
    recorder = Recorder()
    for outputs, expected in (
        ((1, 2), ((1, 2), {})),
        ({"preds": 1}, ((), {"preds": 1})),
        (3, ((3,), {})),
    ):
        update_metrics({"x": recorder}, outputs)
        assert recorder.value == expected
    update_metrics({}, None)
    with pytest.raises(UsageError, match="its loss\\(\\) returns no outputs to update them with"):
        update_metrics({"x": recorder}, None)


def test_numbers_stay_numbers_and_tensors_become_lists() -> None:
    computed = {
        "scalar": torch.tensor(2.5),
        "array": np.float32(0.5),
        "yes": torch.tensor(True),
        "matrix": torch.tensor([[1, 2], [3, 4]]),
        "curve": (torch.tensor([0.5]), [1]),
        "several": {"a": torch.tensor(1), "b": {"c": 2.0}},
    }
    metrics = {name: Recorder(value) for name, value in computed.items()}
    reported = compute_metrics(metrics, ALONE, is_updated=True)
    assert reported == {
        "scalar": 2.5,
        "array": 0.5,
        "yes": 1.0,
        "matrix": [[1, 2], [3, 4]],
        "curve": [[0.5], [1]],
        "several/a": 1,
        "several/b/c": 2.0,
    }
    assert list(numbers(reported)) == ["scalar", "array", "yes", "several/a", "several/b/c"]
    with pytest.raises(UsageError, match="the metric 'x' computed a str"):
        compute_metrics({"x": Recorder("high")}, ALONE, is_updated=True)
