"""The built-in tasks can be run as they are."""

from __future__ import annotations

import pytest

from drumline.config import PRESETS, read_flags, read_layers, resolve


def test_the_tasks_are_those_the_issue_names() -> None:
    assert list(PRESETS) == ["digits", "cifar10", "text", "synthetic"]


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_a_complete_config_with_a_summary_of_one_line(name: str) -> None:
    preset = PRESETS[name]
    config = resolve(
        read_layers(read_flags([]), config_file=None, environment={}), preset.defaults, task=name
    )
    assert config.train.batch_size is not None
    assert preset.summary
    assert "\n" not in preset.summary
