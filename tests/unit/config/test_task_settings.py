"""A task's own settings: which attributes are some, and what flags, a file and the class make of
them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import pytest

from drumline.base.errors import ConfigError
from drumline.config import check_layers, read_flags, read_layers
from drumline.config.config_file import to_toml
from drumline.config.fields import task_fields
from drumline.config.help import render_help, task_docs
from drumline.config.resolve import HOW_TO_DECLARE
from drumline.config.schema import Bounds, Config
from drumline.training.job.job import flat, make_manager
from drumline.training.resume import changed_settings
from drumline.training.run_context import RunRequest
from drumline.training.tasks.base import Task
from drumline.training.tasks.built_in import ImageClassification, resolve_task

if TYPE_CHECKING:
    from collections import OrderedDict


class Base(Task):
    defaults: ClassVar[Any] = {"train.epochs": 1, "train.batch_size": 8}

    width: int = 64
    """Units of the
    hidden layer."""
    rate: Annotated[float, Bounds(above=0)] = 1
    norm: Literal["batch", "layer"] = "batch"


class Mine(Base):
    width = 32
    augment: bool = False
    sizes: tuple[int, ...] = (1, 2)
    prefix: str = ""
    limit: int | None = None
    # None of these is a setting:
    best_metric = "loss"
    registry: OrderedDict[str, int] | None = None
    declared: int
    table: dict[str, int] = {}  # noqa: RUF012
    shared: ClassVar[int] = 3
    _hidden: int = 3
    plain = 4


def config_of(task: type[Task], *argv: str, file: Path | None = None) -> Config:
    layers = read_layers(read_flags(argv), config_file=file, environment={})
    check_layers(layers)
    return resolve_task("mine.py:Mine", task, layers)


def problems_of(task: type[Task], *argv: str, file: Path | None = None) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as raised:
        config_of(task, *argv, file=file)
    return raised.value.problems


def test_annotated_attributes_with_a_default_are_settings() -> None:
    assert config_of(Mine).task == {
        "width": 32,
        "rate": 1.0,
        "norm": "batch",
        "augment": False,
        "sizes": (1, 2),
        "prefix": "",
        "limit": None,
    }
    assert task_fields(ImageClassification, Task) == {}


def test_flags_override_the_file_and_the_file_the_class(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[task]\nwidth = 7\nsizes = [3]\nprefix = "a"\n')
    config = config_of(Mine, "--task.width", "9", "--task.augment", "--task.limit=5", file=file)
    assert config.task == {
        **config_of(Mine).task,
        "width": 9,
        "sizes": (3,),
        "prefix": "a",
        "augment": True,
        "limit": 5,
    }
    task = Mine(config)
    assert (task.width, task.sizes, task.augment, task.prefix) == (9, (3,), True, "a")
    assert Mine(Config()).width == 32
    assert config_of(Mine, "--no-task.augment", "--task.prefix=").task == config_of(Mine).task


def test_defaults_of_the_task_may_set_them_too() -> None:
    class Wide(Mine):
        defaults: ClassVar[Any] = {**Base.defaults, "task.width": 512}

    assert config_of(Wide).task["width"] == 512


def test_all_mistakes_are_reported_at_once_with_a_hint(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[task]\nnorm = "bach"\n')
    assert problems_of(
        Mine,
        "--task.widht",
        "9",
        "--task.rate",
        "x",
        "--task.limit",
        "--no-task.width",
        "--task.sizes=1,b",
        file=file,
    ) == (
        "--task.widht: unknown setting; did you mean 'task.width'?",
        "--task.rate: 'x' is not a number",
        "--task.limit: the value is missing (whole number, or none)",
        "--no-task.width: only a true | false setting can be turned off this way",
        "--task.sizes: [1, 'b'], where 'b' is not a whole number",
        f"{file}:2: task.norm = 'bach' is not one of batch, layer; did you mean 'batch'?",
    )


def test_what_is_no_setting_is_explained() -> None:
    names = "task.width, task.rate, task.norm, task.augment, task.sizes, task.prefix, task.limit"
    assert problems_of(Mine, "--task.table", "3") == (
        f"--task.table: unknown setting; Mine has {names}; {HOW_TO_DECLARE}",
    )

    class Bare(Task):
        defaults = Base.defaults

    assert problems_of(Bare, "--task.x", "3") == (
        f"--task.x: unknown setting; Bare has no settings of its own; {HOW_TO_DECLARE}",
    )


def test_a_default_of_the_wrong_type_is_the_classs_mistake() -> None:
    class Wrong(Base):
        width = None  # type: ignore[assignment]

    assert problems_of(Wrong) == ("Wrong: task.width = none is not a whole number",)


def test_config_toml_gives_the_same_settings_again(tmp_path: Path) -> None:
    config = config_of(Mine, "--task.sizes=4,5", "--task.prefix=a b", "--task.augment")
    file = tmp_path / "config.toml"
    file.write_text(to_toml(config))
    assert "[task]\nwidth = 32\n" in file.read_text()
    assert config_of(Mine, file=file) == config
    file.write_text("task = 3\n")
    assert problems_of(Mine, file=file) == (f"{file}:1: task = 3 is not a section; write [task]",)


def test_help_has_type_default_and_doc() -> None:
    docs = task_docs(Mine)
    own_settings = {
        path: (field, docs.get(path, "")) for path, field in task_fields(Mine, Task).items()
    }
    text = render_help(task="Mine", task_settings=own_settings)
    assert (
        "task  Settings of Mine.\n  --task.width  whole number  [32]\n      Units of the hidden layer.\n"
        in text
    )
    assert "--task.norm  batch | layer  [batch]" in text


def test_ranks_compare_them_and_a_resumed_run_names_a_change(tmp_path: Path) -> None:
    before = config_of(Mine)
    now = config_of(Mine, "--task.width=9", "--task.sizes=1,2")
    assert make_manager(now)._settings["task.width"] == 9
    request = RunRequest("mine.py:Mine", now, tmp_path, fresh=False, command=())
    facts = {"task": "mine.py:Mine", "config": flat(before)}
    assert changed_settings(facts, request) == {"task.width": (32, 9)}
    assert changed_settings(facts, replace(request, config=before)) == {}
