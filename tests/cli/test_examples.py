"""Every example runs, is as short as promised, and learns what it should."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest

from drumline.user_code import load_class
from tests.example_folders import MAKERS

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted(path for path in (ROOT / "examples").glob("*.py") if path.name != "spirals.py")
COMMANDS = re.compile(r"^ *((?:drumline|torchrun|python) .*)$", re.MULTILINE)
LONGEST = dict.fromkeys((path.name for path in EXAMPLES), 80) | {"own_task.py": 40}
PROGRAMS = {"drumline": ["-m", "drumline"], "torchrun": ["-m", "torch.distributed.run", "--standalone"], "python": []}


def commands() -> list[tuple[str, str]]:
    """What the examples' own docstrings say to type."""
    return [(path.name, command) for path in EXAMPLES for command in COMMANDS.findall(path.read_text())]


def test_every_example_says_how_to_run_it() -> None:
    assert len(EXAMPLES) >= 3
    assert {name for name, _ in commands()} == {path.name for path in EXAMPLES}


@pytest.mark.parametrize(("name", "lines"), LONGEST.items())
def test_examples_are_short(name: str, lines: int) -> None:
    assert len((ROOT / "examples" / name).read_text().splitlines()) <= lines


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize(("name", "command"), commands())
def test_an_example_runs_and_learns(tmp_path: Path, name: str, command: str) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    if name in MAKERS:
        MAKERS[name](tmp_path)
    program, *arguments = command.split()
    result = subprocess.run(
        [sys.executable, *PROGRAMS[program], *arguments],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    found = re.findall(r"(?:accuracy|step \d+:)\s+([\d.]+)(%?)", result.stdout)
    assert found, result.stdout
    value, percent = found[-1]
    assert float(value) / (100 if percent else 1) > 0.9


def test_a_stream_of_shards_continues_where_its_state_was_taken(tmp_path: Path) -> None:
    MAKERS["tar_shards.py"](tmp_path)
    stream = load_class(f"{ROOT / 'examples' / 'tar_shards.py'}:TarStream")
    paths = sorted((tmp_path / "shards").glob("train-*.tar"))[:2]
    whole = [(point.tolist(), label) for point, label in stream(paths, splits=True)]
    assert len(whole) == 1000
    for taken in (0, 3, 500, 997, 1000):  # 500: at the end of a shard, 1000: at the very end
        first, second = stream(paths, splits=True), stream(paths, splits=True)
        before = list(islice(first, taken))
        second.load_state_dict(first.state_dict())
        assert len(before) == taken
        assert [(point.tolist(), label) for point, label in second] == whole[taken:]
