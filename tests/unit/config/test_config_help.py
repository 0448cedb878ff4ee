"""`drumline train --help`: nothing is missing, and it is pleasant in 80 columns."""

from __future__ import annotations

import pytest

from drumline.config import PRESETS
from drumline.config.fields import FIELDS, SECTIONS, describe_type
from drumline.config.help import field_docs, render_entry, render_help


def one_line(text: str) -> str:
    return " ".join(text.split())


def test_every_field_is_there_with_what_it_takes_its_default_and_its_doc() -> None:
    text = one_line(render_help())
    texts = field_docs()
    counted = 0
    for path, field in FIELDS.items():
        default = {
            "model.widths": "16,32,64",
            "optim.betas": "0.9,0.95",
            "model.options": "empty",
            "model.activation_checkpointing": "none",
            "optim.options": "empty",
        }.get(path, "none" if field.default is None else str(field.default))
        default = default.lower()
        flag = f"--{path}.NAME" if field.is_table else f"--{path}"
        assert f"{flag} {describe_type(field.annotation)} [{default}] {texts[path]}" in text
        counted += 1
    assert counted == len(FIELDS) > 50


def test_every_section_and_task_is_there() -> None:
    lines = render_help().splitlines()
    assert [line.split("  ")[0] for line in lines if line[:1].isalpha()] == [
        "tasks",
        "settings",
        *SECTIONS,
    ]
    text = one_line(render_help())
    assert all(f"{name} {preset.summary}" in text for name, preset in PRESETS.items())


@pytest.mark.parametrize("width", [64, 80, 100])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    assert max(len(line) for line in render_help(width=width).splitlines()) <= width


def test_a_very_narrow_or_wide_terminal_gets_a_readable_width() -> None:
    assert render_help(width=10) == render_help(width=64)
    assert render_help(width=500) == render_help(width=100)


def test_a_tasks_defaults_are_shown_in_place_of_the_schemas() -> None:
    defaults = {"optim.lr": 0.25, "model.widths": (8, 16), "model.options.hidden": 64}
    text = render_help(task="MyTask", task_defaults=defaults)
    assert "--optim.lr  number above 0  [MyTask: 0.25]" in text
    assert "[MyTask: 8,16]" in text
    assert "[MyTask: hidden=64]" in text
    assert "[0.9,0.95]" in text


def test_a_table_of_options_in_a_tasks_defaults_is_shown() -> None:
    assert "[task: hidden=64, bias=true]" in render_help(
        task_defaults={"model.options": {"hidden": 64, "bias": True}}
    )


def test_an_entry_of_the_commands_own_looks_the_same() -> None:
    assert render_entry("--run", "folder", "Where the run is kept.", default="runs/TASK") == (
        "  --run  folder  [runs/TASK]\n      Where the run is kept."
    )
    assert render_entry("--fresh", "", "Start over.") == "  --fresh\n      Start over."
