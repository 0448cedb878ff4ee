"""A checkpoint's weights as a plain file: read back by torch and the safetensors package, with a
model card."""

from __future__ import annotations

import json
import struct
import tomllib
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

import drumline
from drumline.checkpoint import store
from drumline.cli import main
from drumline.runs import catalog
from drumline.runs.manifest import Manifest
from drumline.training.run_context import HOOKS_FILE
from drumline.training.saved.exported_weights import model_card
from drumline.training.saved.saved_run import find_checkpoint
from tests.jobs import Classify, Points, make_config, newest, train_here, train_on


class TiedLayers(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(6)
        self.out = nn.Linear(6, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.out(self.norm(self.second(torch.tanh(self.first(inputs)))))
        return outputs


class Exported(Classify):
    """Evaluated with an average of the weights: with the last of two."""

    def model(self) -> nn.Module:
        return TiedLayers().double()

    def hooks(self) -> list[drumline.Hook]:
        return [drumline.EMA(0.5), drumline.EMA(0.8)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("trained") / "run"
    train_on(2, make_config(epochs=3), Exported, run)
    return run


def header(path: Path) -> dict[str, Any]:
    """As the format's documentation has it: 8 bytes of length, JSON, then the tensors without a
    gap."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    document: dict[str, Any] = json.loads(content[8 : 8 + length])
    # transformers refuses a file without it
    assert document.pop("__metadata__") == {"format": "pt"}
    spans = sorted(entry["data_offsets"] for entry in document.values())
    assert [span[0] for span in spans] == [0, *(span[1] for span in spans[:-1])]
    assert spans[-1][1] == len(content) - 8 - length
    return document


def test_the_file_is_plain_and_loads_strictly(trained: Path, tmp_path: Path) -> None:
    to = tmp_path / "new" / "weights.safetensors"
    assert main(["export", str(trained), "--which", "last", "--to", str(to)]) == 0
    fresh = TiedLayers().double()
    model = newest(trained).tensors["model"]
    assert header(to).keys() == fresh.state_dict().keys()
    # a checkpoint has a tied weight once, the file has it under both names
    assert "second.weight" not in model
    fresh.load_state_dict(load_file(to), strict=True)
    assert fresh.second.weight is fresh.first.weight
    for name, tensor in fresh.state_dict().items():
        assert torch.equal(tensor, model["first.weight" if name == "second.weight" else name])
    assert sorted(path.name for path in to.parent.iterdir()) == [
        "weights.md",
        "weights.safetensors",
    ]


def test_the_average_is_what_the_run_was_evaluated_with(trained: Path, tmp_path: Path) -> None:
    to = tmp_path / "average.safetensors"
    assert main(["export", str(trained), "--which", "last", "--ema", "--to", str(to)]) == 0
    average = load_file(to)
    saved = newest(trained).tensors[HOOKS_FILE]
    assert torch.equal(average["out.weight"], saved["1/average/out.weight"])
    assert not torch.equal(average["out.weight"], newest(trained).tensors["model"]["out.weight"])
    model = TiedLayers().double().eval()
    points = Points(29)
    model.load_state_dict(average, strict=True)
    loss = functional.cross_entropy(model(points.inputs), points.targets).item()
    assert loss == pytest.approx(
        catalog.check_sizes(find_checkpoint(trained, "last")).metrics["loss"], rel=1e-12
    )


def test_the_screen_says_which_weights_were_exported(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["export", str(trained), "--which", "last", "--to"]
    assert main([*words, str(tmp_path / "trained.safetensors")]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first.endswith(
        ", as trained; --ema exports their average (EMA), which evaluate and predict use"
    )
    assert main([*words, str(tmp_path / "average.safetensors"), "--ema"]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first.endswith(", averaged (EMA)")


def test_the_card_has_task_checkpoint_metrics_and_settings(trained: Path, tmp_path: Path) -> None:
    to = tmp_path / "weights.safetensors"
    best = catalog.check_sizes(find_checkpoint(trained, "best"))
    assert main(["export", str(trained), "--which", "best", "--to", str(to)]) == 0
    card = to.with_suffix(".md").read_text()
    assert card.startswith(f"# test, step {best.step}\n")
    for line in (
        "| task | `test` |",
        "| weights | 11 tensors, ",
        "| began with | random weights |",
        "| global batch | 8 samples on 2 ranks |",
        f"| accuracy | {best.metrics['accuracy']:.6g} |",
        "Measured with the average of the weights (EMA), which these are not.",
        'model.load_state_dict(load_file("weights.safetensors"))',
    ):
        assert line in card
    settings = tomllib.loads(card.partition("```toml\n")[2].partition("```")[0])
    assert settings["optim"] == {"weight_decay": 0.0, "clip_norm": 0.5, "schedule": "constant"}
    assert settings["train"] == {"epochs": 3, "batch_size": 8, "eval_batch_size": 5}
    assert "log" not in settings
    assert main(["export", str(trained), "--ema", "--to", str(to), "--force"]) == 0
    card = to.with_suffix(".md").read_text()
    assert ", averaged (EMA) |" in card
    assert "which these are not" not in card


def test_a_card_has_plain_text_whatever_the_checkpoint_names() -> None:
    wrong = "a|b`c<img src=x>\n```\n[here](http://x)\x1b[2J"
    facts = {
        "task": wrong,
        "config": {wrong: wrong, "model.init": wrong},
        "batch_size": 8,
        "world_size": 2,
    }
    record = Manifest(3, wrong, {wrong: 0.5}, {})
    snapshot = store.Snapshot({"model": {}}, {"progress": {"facts": facts}})
    with patch.object(catalog, "check_sizes", return_value=record):
        card = model_card(
            Path(), snapshot, contents="", file="weights.safetensors", has_other_average=False
        )
    settings = card.partition("```toml\n")[2].partition("\n```")[0]
    assert json.loads(settings.partition(" = ")[2]) == wrong
    rest = card.replace(settings, "")
    assert not any(mark in rest for mark in ("<", "](", "\x1b", "a|b"))
    assert rest.count("```") == 4


def test_refusals(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    to = tmp_path / "weights.safetensors"
    (tmp_path / "weights.md").write_text("mine")
    plain = tmp_path / "plain"
    train_here(make_config(epochs=1), Classify, plain)

    def refusal(*words: str) -> str:
        assert main(["export", *words]) == 2
        return capsys.readouterr().err

    run = str(trained)
    assert (
        "weights.md exists already\n  try: give --to another name, or --force to replace it"
        in refusal(run, "--to", str(to))
    )
    assert (tmp_path / "weights.md").read_text() == "mine"
    assert not to.exists()
    assert "weights.pt does not end in .safetensors" in refusal(
        run, "--to", str(tmp_path / "weights.pt")
    )
    assert "--last: unknown flag" in refusal(run, "--last", "--to", "a")
    assert "has no checkpoint of step 999" in refusal(
        run, "--which", "999", "--to", str(tmp_path / "a.safetensors")
    )
    assert "no --to FILE was given" in refusal(run)
    assert "no RUN was given" in refusal()
    assert "--optim.lr: is a setting of a run; export takes none" in refusal(
        run, "--optim.lr", "1", "--to", "a"
    )
    average = refusal(str(plain), "--ema", "--to", str(tmp_path / "a.safetensors"))
    assert (
        "the checkpoint holds no average of the weights\n  try: leave --ema (ema=True) out, or train with"
        in average
    )
    assert list(tmp_path.glob("*.safetensors")) == []
