"""Several evaluation sets, and metrics that are no sums: right, and the same number on any number
of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from drumline.checkpoint.rank_states import gather_states
from drumline.rank import collectives
from drumline.runs import catalog
from drumline.runs.events import read_events
from drumline.training.job.evaluation_job import evaluate
from drumline.training.job.job import build_job, make_manager
from drumline.training.tasks.base import Loss
from tests.jobs import Classify, Points, make_config, train_on
from tests.ranks import run_ranks

CLASSES = 2


class MedianMargin:
    """A metric as a user writes it: the median is no sum. It has no state before its first
    update."""

    def __init__(self) -> None:
        self.values: list[Tensor] = []

    @property
    def metric_state(self) -> dict[str, Tensor]:
        return {"values": torch.cat(self.values)}

    def update(self, scores: Tensor, labels: Tensor) -> None:
        self.values.append(scores[:, 1] - scores[:, 0])

    def merge_state(self, state: Mapping[str, Tensor]) -> None:
        self.values.append(state["values"])

    def compute(self) -> Tensor:
        return torch.cat(self.values).median()

    def reset(self) -> None:
        self.values = []


class Measured(Classify):
    """Six batches of one set, and two of the other: of four ranks two have none of it."""

    best_metric = "plain/f1"
    higher_is_better = True

    def eval_data(self) -> dict[str, Points]:
        shifted = Points(7)
        shifted.inputs = shifted.inputs + 0.3
        return {"plain": Points(29), "shifted": shifted}

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        scores = model(batch[0])
        total = nn.functional.cross_entropy(scores, batch[1], reduction="sum")
        return Loss(total, outputs=(scores.softmax(1), batch[1]))

    def metrics(self) -> dict[str, Any]:
        # which takes seconds
        from torchmetrics import MetricCollection, classification, wrappers

        return {
            "f1": classification.MulticlassF1Score(CLASSES, average="macro"),
            "auroc": classification.MulticlassAUROC(CLASSES),
            "confusion": classification.MulticlassConfusionMatrix(CLASSES),
            "recall": wrappers.ClasswiseWrapper(
                classification.MulticlassRecall(CLASSES, average=None),
                labels=["no", "yes"],
                prefix="of-",
            ),
            "margin": MedianMargin(),
            "all": MetricCollection(
                {
                    "f1": classification.MulticlassF1Score(CLASSES, average="macro"),
                    "recall": classification.MulticlassRecall(CLASSES),
                }
            ),
        }


CONFIG = make_config(epochs=1)


def measured() -> tuple[dict[str, Any], dict[str, Any], dict[str, list[Any]]]:
    """Two evaluations of the untrained model, and its outputs for each whole set."""
    with make_manager(CONFIG) as ddp:
        job = build_job(CONFIG, Measured(CONFIG), ddp)
        sets = job.task.eval_data()
        with torch.no_grad():
            outputs = {
                name: [job.model(data.inputs).softmax(1).tolist(), data.targets.tolist()]
                for name, data in sets.items()
            }
        results = evaluate(job), evaluate(job), outputs
        job.close()
        return results


def test_metrics_are_those_of_scikit_learn_on_one_and_three_ranks() -> None:
    from sklearn import metrics as sklearn_metrics

    by_ranks = {world_size: run_ranks(world_size, measured) for world_size in (1, 3)}
    [(first, _, outputs)] = by_ranks[1]
    for results in by_ranks.values():
        for one, again, _ in results:
            assert one == again == first  # on every rank, and the second time
    assert [name for name in first if name.startswith("plain/")] == [
        f"plain/{name}"
        for name in (
            "loss",
            "f1",
            "auroc",
            "confusion",
            "recall/of-no",
            "recall/of-yes",
            "margin",
            "all/f1",
            "all/recall",
        )
    ]
    for name, both in outputs.items():
        scores, labels = map(torch.tensor, both)
        chosen = scores.argmax(1)
        assert (
            first[f"{name}/confusion"]
            == sklearn_metrics.confusion_matrix(labels, chosen, labels=[0, 1]).tolist()
        )
        expected = {
            "f1": sklearn_metrics.f1_score(labels, chosen, average="macro"),
            "auroc": sklearn_metrics.roc_auc_score(labels, scores[:, 1]),
            "margin": float((scores[:, 1] - scores[:, 0]).median()),
        }
        recalls = sklearn_metrics.recall_score(labels, chosen, average=None)
        expected |= {"all/f1": expected["f1"], "all/recall": recalls.mean()}
        expected |= {
            f"recall/of-{label}": recall
            for label, recall in zip(("no", "yes"), recalls, strict=True)
        }
        assert {key: first[f"{name}/{key}"] for key in expected} == pytest.approx(
            expected, rel=1e-6
        )
        loss = nn.functional.nll_loss(scores.log(), labels)
        assert first[f"{name}/loss"] == pytest.approx(float(loss))


def gathered_here() -> list[list[str]]:
    """Rank r has 5 + 3 * r numbers, in pieces of 16 bytes."""
    with make_manager(CONFIG) as ddp, patch.object(collectives, "PIECE_BYTES", 16):
        own = {"values": torch.arange(5 + 3 * ddp.rank, dtype=torch.float32) + ddp.rank}
        document, tensors = gather_states(ddp.rank, own)
        assert document["ranks"] == [0, 1, 2]
        return [[name, *tensor.tolist()] for name, tensor in tensors.items()]


def test_only_rank_0_holds_the_states_of_all_ranks() -> None:
    expected = [
        [f"{rank}/values", *(float(value) for value in range(rank, 5 + 4 * rank))]
        for rank in range(3)
    ]
    assert run_ranks(3, gathered_here) == [expected, [], []]


def test_a_run_evaluates_by_steps_and_keeps_the_best_by_the_metric_of_a_set(tmp_path: Path) -> None:
    config = make_config(epochs=2, eval_every_steps=3)
    train_on(2, config, Measured, tmp_path)
    events = list(read_events(tmp_path / "events" / "rank-00000.jsonl"))
    found = [event for event in events if event["kind"] == "evaluation"]
    # an epoch has 5 steps
    assert [event["step"] for event in found] == [3, 5, 6, 9, 10]
    assert {event["samples"] for event in found} == {29 + 7}
    assert sum(map(sum, found[0]["plain/confusion"])) == 29
    assert not [event for event in events if event["kind"] == "warning"]
    saved = {
        step: catalog.check_sizes(tmp_path / "checkpoints" / catalog.folder_name(step)).metrics
        for step in (5, 10)
    }
    assert saved[10]["plain/f1"] == found[-1]["plain/f1"]
    # a checkpoint has numbers
    assert not any("confusion" in name for name in saved[10])
    (end,) = [event for event in events if event["kind"] == "end"]
    assert end["best_step"] == max(saved, key=lambda step: (saved[step]["plain/f1"], step))
    lines = (tmp_path / "logs" / "rank-00000.log").read_text()
    assert f"plain/f1 {found[0]['plain/f1']:.4f}" in lines
    assert "shifted/loss" in lines
