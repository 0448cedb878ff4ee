"""`drumline train TASK`: names become task classes."""

from __future__ import annotations

from pathlib import Path

import pytest

from drumline.base.errors import UsageError
from drumline.config import PRESETS
from drumline.training.tasks import ImageClassification, LanguageModel, Task, load_task
from drumline.training.tasks.built_in import BUILT_IN


def test_built_in_names_are_those_of_the_presets() -> None:
    assert BUILT_IN.keys() == PRESETS.keys()
    assert load_task("digits") is ImageClassification
    assert load_task("text") is LanguageModel


def test_a_task_of_the_users_own_file(tmp_path: Path) -> None:
    file = tmp_path / "own_loaded_task.py"
    file.write_text(
        "from drumline import Task\nclass Mine(Task):\n    defaults = {'optim.lr': 0.5}\n"
    )

    loaded = load_task(f"{file}:Mine")

    assert issubclass(loaded, Task)
    assert loaded.defaults == {"optim.lr": 0.5}


def test_a_task_of_a_package() -> None:
    assert load_task("drumline.training.tasks.built_in:LanguageModel") is LanguageModel


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(UsageError, match="no task 'digit'; did you mean 'digits'") as caught:
        load_task("digit")

    assert "path/to/file.py:ClassName" in str(caught.value)


def test_a_typo_is_answered_with_a_task_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "own_misspelt_task.py"
    file.write_text(
        "from torch.utils.data import Dataset\nfrom drumline import Task\n"
        "class SpiralData(Dataset):\n    pass\nclass Spirals(Task):\n    pass\n"
    )
    with pytest.raises(UsageError, match="has no class 'SpiralDat'; did you mean 'SpiralData'"):
        load_task(f"{file}:SpiralDat")


def test_a_class_that_is_no_task_is_refused() -> None:
    with pytest.raises(UsageError, match="collections:Counter is not a Task") as caught:
        load_task("collections:Counter")

    assert "class Counter(drumline.Task)" in str(caught.value)


def test_a_task_that_cannot_be_made_from_the_settings_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "own_constructed_task.py"
    file.write_text(
        "from drumline import Task\n"
        "class Bare(Task):\n    def __init__(self):\n        self.width = 3\n"
        "class More(Task):\n    def __init__(self, config, width):\n        super().__init__(config)\n"
        "class Right(Task):\n    def __init__(self, config, width=3):\n        super().__init__(config)\n"
        "class Passes(Task):\n    def __init__(self, *args, **kwargs):\n        super().__init__(*args, **kwargs)\n"
    )
    with pytest.raises(UsageError) as caught:
        load_task(f"{file}:Bare")
    assert str(caught.value) == (
        "Bare.__init__(self) cannot be called as Bare(config), which is how Drumline makes a task\n"
        "  try: write `def __init__(self, config):` with `super().__init__(config)` as its first line, or leave "
        "__init__ out"
    )
    with pytest.raises(
        UsageError,
        match=r"^More\.__init__\(self, config, width\) cannot be called as More\(config\)",
    ):
        load_task(f"{file}:More")
    assert load_task(f"{file}:Right").__name__ == "Right"
    assert load_task(f"{file}:Passes").__name__ == "Passes"
