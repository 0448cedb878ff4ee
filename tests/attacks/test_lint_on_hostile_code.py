"""`drumline lint` in a folder from somebody else: it waits for nothing, and `--fix` writes nowhere
else."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from drumline.cli import main
from drumline_lint.errors import UsageError
from drumline_lint.reading.notebook import read_notebook
from drumline_lint.reading.parse import read_bytes, read_file
from drumline_lint.rules import dl016_wrapped_state_dict
from drumline_lint.settings import find_table
from tests.attacks.growth import growth
from tests.attacks.limits import bounded

WRONG = dl016_wrapped_state_dict.RULE.bad


def notebook(*cells: str) -> bytes:
    return json.dumps({"cells": [{"cell_type": "code", "source": cell} for cell in cells]}).encode()


def linted(*arguments: object) -> int:
    try:
        return main(["lint", "--no-config", *map(str, arguments)]) or 0
    except SystemExit as end:
        return int(end.code or 0)


@pytest.mark.parametrize("kind", ["fifo", "/dev/zero"])
def test_what_is_no_file_is_a_problem(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "train.py"
    os.mkfifo(path) if kind == "fifo" else path.symlink_to(kind)
    with bounded(cpu_s=10):
        assert linted(path) == 2
    assert "the file cannot be opened: it is not a regular file" in "".join(capsys.readouterr())


def test_a_folder_with_such_files_is_read_without_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "a.py")
    (tmp_path / "b.py").symlink_to("/dev/zero")
    (tmp_path / "c.py").write_text("x = 1\n")
    with bounded(cpu_s=10):
        assert linted(tmp_path) == 0
    capsys.readouterr()


def test_a_file_that_is_too_large_is_a_problem(tmp_path: Path) -> None:
    with (tmp_path / "large.py").open("wb") as file:
        file.truncate(1 << 40)
    with bounded():
        (said,) = read_file(tmp_path / "large.py").problems
    assert said.message == "the file cannot be opened: it has more than 67,108,864 bytes"


@pytest.mark.parametrize(
    "cell",
    [
        " " * 20_000 + "x y",
        "x" + " " * 20_000 + "y",
        "x" + " " * 20_000 + "= y z",
        "x = " + " " * 20_000 + "y z",
        "a" * 20_000 + "?" + " " * 20_000 + "x",
        "%%time" + " " * 20_000 + "\nx y",
        "[" * 20_000 + "%",
        "x," * 20_000 + "%",
        "# noqa:" + " A1" * 20_000 + "\n%",
    ],
    ids=[
        "indent",
        "gap",
        "before =",
        "behind =",
        "magic",
        "cell magic",
        "brackets",
        "commas",
        "noqa",
    ],
)
def test_a_notebook_is_read_in_linear_time(cell: str) -> None:
    with bounded():
        source, _ = read_notebook(Path("a.ipynb"), notebook(cell, "x = 1"))
    assert source is None or "x = 1" in source.text


@pytest.mark.parametrize(
    "text", ["[" * 200_000, '{"cells": ' + "7" * 6000 + "}", '{"cells": [' * 50_000, "\ud800"]
)
def test_a_notebook_that_is_hard_to_decode_is_a_problem(text: str) -> None:
    with bounded():
        (said,) = read_bytes(Path("a.ipynb"), text.encode("utf-8", "surrogatepass")).problems
    assert said.message.startswith("the notebook cannot be read: it is not JSON")


def test_settings_that_are_hard_to_decode_are_an_error(tmp_path: Path) -> None:
    for text in ("a = " + "[" * 200_000, "a." * 100_000 + "a = 1"):
        (tmp_path / "pyproject.toml").write_text(text)
        with bounded(), pytest.raises(UsageError, match=r"pyproject.toml cannot be read"):
            find_table(tmp_path)


@pytest.mark.parametrize("link", ["a file", "a folder"])
def test_fix_writes_nothing_outside_of_the_folder(
    tmp_path: Path, link: str, capsys: pytest.CaptureFixture[str]
) -> None:
    outside = tmp_path / "home"
    outside.mkdir()
    (outside / "victim.py").write_text(WRONG)
    project = tmp_path / "project"
    project.mkdir()
    (project / "own.py").write_text(WRONG)
    if link == "a file":
        (project / "link.py").symlink_to(outside / "victim.py")
    else:
        (project / "link").symlink_to(outside)
    assert linted("--fix", "--select", "DL016", project) == 2
    printed = "".join(capsys.readouterr())
    assert "the file was not fixed: a link leads out of the folder" in printed
    assert (outside / "victim.py").read_text() == WRONG
    assert (project / "own.py").read_text() != WRONG
    # The user may name it.
    linted("--fix", "--select", "DL016", project, outside)
    assert (outside / "victim.py").read_text() != WRONG
    capsys.readouterr()


HEAD = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("nccl")
rank = dist.get_rank()
"""
MODEL = """
model = DistributedDataParallel(torch.nn.Linear(1, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1)
for batch in loader:
"""
STEP = """
    optimizer.zero_grad()
    loss = model(batch).sum()
    loss.backward()
    optimizer.step()
    print(loss.item())
"""
CONDITION = "if rank == 0:\n    dist.barrier()\n"
REPEATED = {"conditions on ranks": (HEAD, CONDITION), "steps": (HEAD + MODEL, STEP)}


@pytest.mark.parametrize(("head", "part"), REPEATED.values(), ids=REPEATED.keys())
def test_repeated_source_does_not_take_minutes(
    tmp_path: Path, head: str, part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def lint(count: int) -> None:
        (tmp_path / "train.py").write_text(head + part * count)
        linted(tmp_path / "train.py")
        capsys.readouterr()

    # 16 where the time is quadratic; it was 100 to 200
    assert growth(lint, size=12, factor=4) < 24
    if part == CONDITION:
        assert growth(lint, size=40, factor=4) < 8  # 5 now; it was 12
