"""A new run begins with the weights that --model.init names, on every rank; a resumed run has its
own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from drumline.base.errors import UsageError
from drumline.checkpoint import store
from drumline.config.schema import Config, OptimConfig
from drumline.runs.events import read_events
from drumline.training.saved.saved_run import find_checkpoint
from tests.jobs import Classify, Normalised, make_config, newest, train_here, train_on

# no weight changes by that little
STILL = OptimConfig(lr=1e-300, weight_decay=0.0, schedule="constant")


class Wider(Classify):
    """Three classes in place of two."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.0), nn.Linear(8, 3)).double()


def config_with(init: Path | None, *, strict: bool = True, **settings: Any) -> Config:
    config = make_config(**settings)
    return replace(
        config,
        model=replace(config.model, init=None if init is None else str(init), init_strict=strict),
    )


def weights(run: Path) -> dict[str, Tensor]:
    return newest(run).tensors["model"]


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


def messages(run: Path, kind: str) -> list[str]:
    return [
        event["message"]
        for event in read_events(run / "events" / "rank-00000.jsonl")
        if event["kind"] == kind
    ]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("trained") / "run"
    train_here(make_config(epochs=2, samples=16), Normalised, run)
    return run


@pytest.mark.world_size(2)
def test_a_run_begins_with_the_best_checkpoint_of_another(trained: Path, tmp_path: Path) -> None:
    best = find_checkpoint(trained, "best")
    # Statistics of BatchNorm change in a step, parameters do not: in evaluation mode neither.
    train_on(2, config_with(trained, optim=STILL, steps=1, samples=16), Normalised, tmp_path)
    expected = store.read(best).tensors["model"]
    found = weights(tmp_path)
    moved = {name for name in expected if not torch.equal(expected[name], found[name])}
    assert moved <= {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    assert found["1.num_batches_tracked"] == expected["1.num_batches_tracked"] + 1
    assert f"begins with {len(expected)} tensors from {best}" in messages(tmp_path, "note")
    facts = newest(tmp_path).documents["progress"]["facts"]
    assert facts["config"]["model.init"] == str(trained)


def test_a_file_is_read_once_and_never_again(tmp_path: Path) -> None:
    """The resumed run, whose file is gone, has the bits of one that was not interrupted."""
    torch.manual_seed(3)
    file = tmp_path / "weights.safetensors"
    config = config_with(tmp_path / "weights.safetensors", steps=4)
    save_file(
        {name: tensor.clone() for name, tensor in Classify(config).model().state_dict().items()},
        file,
    )
    train_here(config, Classify, tmp_path / "whole")
    train_here(config_with(file, steps=2), Classify, tmp_path / "parts")
    assert not torch.equal(weights(tmp_path / "parts")["0.weight"], load_file(file)["0.weight"])
    file.unlink()
    with pytest.raises(
        UsageError,
        match=r"parts began with .*weights\.safetensors and resumes from step 2: --model\.in",
    ):
        train_here(config_with(tmp_path / "others", steps=4), Classify, tmp_path / "parts")
    # leaving it out is no change
    train_here(config_with(None, steps=3), Classify, tmp_path / "parts")
    assert not any("model.init" in message for message in messages(tmp_path / "parts", "warning"))
    train_here(config, Classify, tmp_path / "parts")
    assert_same(weights(tmp_path / "parts"), weights(tmp_path / "whole"))
    assert newest(tmp_path / "parts").documents["progress"]["facts"]["config"]["model.init"] == str(
        file
    )


def test_weights_that_do_not_fit_are_refused_or_left_out(trained: Path, tmp_path: Path) -> None:
    file = tmp_path / "two.safetensors"
    two = {**Classify(make_config()).model().state_dict(), "extra": torch.zeros(1)}
    del two["0.bias"]
    save_file(two, file)
    with pytest.raises(UsageError) as refused:
        train_here(config_with(file, steps=1), Wider, tmp_path / "refused")
    assert str(refused.value).splitlines() == [
        f"the weights in {file} do not fit Sequential:",
        "  - missing: 0.bias",
        "  - not in the model: extra",
        "  - 3.bias is [2], and [3] in the model",
        "  - 3.weight is [2, 8], and [3, 8] in the model",
        "  try: set the model up as for these weights, or load what fits, and list the rest, with "
        "--no-model.init_strict",
    ]
    assert list((tmp_path / "refused" / "checkpoints").glob("*")) == []
    run = tmp_path / "loose"
    train_here(config_with(file, strict=False, optim=STILL, steps=1), Wider, run)
    found = weights(run)
    assert torch.equal(found["0.weight"], two["0.weight"])
    assert found["3.weight"].shape == (3, 8)
    assert "begins with 1 tensor from " in messages(run, "note")[0]
    (warning,) = messages(run, "warning")
    assert warning.startswith(
        "the model keeps its own values where they do not fit: missing: 0.bias; not in the model:"
    )


def test_weights_of_another_model_are_refused_also_where_what_fits_would_do(tmp_path: Path) -> None:
    file = tmp_path / "other.safetensors"
    save_file({"layer.weight": torch.zeros(2)}, file)
    with pytest.raises(
        UsageError, match=r"try: give weights of this model: no tensor of these fits"
    ):
        train_here(config_with(file, strict=False, steps=1), Classify, tmp_path / "run")


def test_a_run_that_was_not_evaluated_needs_a_checkpoint_by_name(tmp_path: Path) -> None:
    class NoEvaluation(Classify):
        def eval_data(self) -> Any:
            return None

    first = tmp_path / "first"
    train_here(make_config(epochs=1), NoEvaluation, first)
    with pytest.raises(
        UsageError, match=r"so none is the best\n  try: name a checkpoint: .*step-00000005"
    ):
        train_here(config_with(first, steps=1), NoEvaluation, tmp_path / "second")
    named = find_checkpoint(first, "last")
    train_here(config_with(named, optim=STILL, steps=1), NoEvaluation, tmp_path / "third")
    assert_same(weights(tmp_path / "third"), weights(first))
