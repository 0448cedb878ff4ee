"""Datasets by name, and the user's own."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from drumline.base.errors import UsageError
from drumline.config.schema import DataConfig
from drumline.training.tasks.built_in import DATASETS, build_dataset

SETTINGS: dict[str, Any] = {
    "split": "train",
    "dir": None,
    "augment": False,
    "image_size": 8,
    "samples": 16,
    "classes": 3,
    "token_type": "uint16",
    "context": 4,
    "seed": 0,
}


@pytest.mark.parametrize(
    ("name", "facts"),
    [
        ("digits", {"in_channels": 1, "num_classes": 10}),
        ("tokens", {"vocab_size": 256}),
        ("synthetic_images", {"in_channels": 3, "num_classes": 3}),
        ("synthetic_tokens", {"vocab_size": 64}),
    ],
)
def test_a_built_in_dataset_tells_what_a_model_needs(name: str, facts: dict[str, int]) -> None:
    dataset = build_dataset(name, **SETTINGS)
    assert {fact: getattr(dataset, fact) for fact in facts} == facts
    assert len(dataset) > 0


def test_every_built_in_dataset_is_in_the_help() -> None:
    help_text = Path(sys.modules[DataConfig.__module__].__file__ or "").read_text()
    for name in DATASETS:
        assert f"`{name}`" in help_text


def test_an_unknown_name_is_reported_with_the_nearest() -> None:
    with pytest.raises(
        UsageError, match=re.escape("there is no dataset 'digit'; did you mean 'digits'?")
    ):
        build_dataset("digit", **SETTINGS)


def test_the_users_own_class_gets_the_settings_it_accepts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_data_of_a_test.py").write_text(
        "class Own:\n"
        "    def __init__(self, split, context=9, more='kept'):\n"
        "        self.given = (split, context, more)\n"
        "class Greedy:\n"
        "    def __init__(self, tokenizer): ...\n"
    )
    monkeypatch.setattr(sys, "path", [*sys.path])
    spec = f"{tmp_path / 'own_data_of_a_test.py'}"
    assert build_dataset(f"{spec}:Own", **SETTINGS).given == ("train", 4, "kept")
    with pytest.raises(
        UsageError,
        match=r"the dataset .*:Greedy needs tokenizer, which neither the dataset nor the settings provide",
    ):
        build_dataset(f"{spec}:Greedy", **SETTINGS)
    del sys.modules["own_data_of_a_test"]
