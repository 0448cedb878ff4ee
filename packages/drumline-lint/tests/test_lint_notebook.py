"""Notebooks: their code is read cell by cell, magics apart, and places are told by cell."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drumline_lint.findings import Finding
from drumline_lint.linter import check
from drumline_lint.reading.notebook import line_in_file, read_notebook
from drumline_lint.reading.parse import read_bytes
from drumline_lint.reading.source import Cell, Source
from drumline_lint.rules import all_rules
from drumline_lint.settings import Settings
from made_up_rules import report_of, told

PATH = Path("n.ipynb")


def code(*lines: str) -> dict[str, Any]:
    return {"cell_type": "code", "source": [f"{line}\n" for line in lines[:-1]] + [*lines[-1:]]}


TEXT = {"cell_type": "markdown", "source": ["# bad()\n"]}


def notebook(*cells: Any, **more: Any) -> bytes:
    return json.dumps({"nbformat": 4, "cells": list(cells), **more}).encode()


def read(*cells: Any) -> Source:
    source, problems = read_notebook(PATH, notebook(*cells))
    assert not problems
    assert source is not None
    return source


def problems_of(data: bytes) -> list[str]:
    problems: list[Finding] = read_notebook(PATH, data)[1]
    return [f"{said.place}: {said.message}" for said in problems]


def test_code_cells_are_joined_and_counted_among_all() -> None:
    source = read(
        TEXT, code("import torch", "x = 1"), TEXT, {"cell_type": "code", "source": "y = 2\r\nz = 3"}
    )
    assert source.text == "import torch\nx = 1\ny = 2\nz = 3"
    assert source.cells == [Cell(2, 1), Cell(4, 3)]
    assert source.is_notebook


def test_places_are_reported_by_cell() -> None:
    data = notebook(
        TEXT, code("x = 1", "bad()"), code(""), code("", "poor()  # noqa: DL102", "bad()")
    )
    assert told(report_of({"n.ipynb": data}).findings) == [
        "n.ipynb:cell 2:2:1 DL101",
        "n.ipynb:cell 4:3:1 DL101",
    ]


def test_a_line_that_is_silenced_is_that_of_the_cell() -> None:
    data = notebook(code("bad()"), code("x = 1  # noqa", "bad()"), code("bad()  # noqa"))
    assert told(report_of({"n.ipynb": data}).findings) == [
        "n.ipynb:cell 1:1:1 DL101",
        "n.ipynb:cell 2:2:1 DL101",
    ]


@pytest.mark.parametrize(
    ("lines", "left"),
    [
        (["%matplotlib inline", "x = 1"], "pass\nx = 1"),
        (["!pip install torch", "x = 1"], "pass\nx = 1"),
        (["!pip install \\", "  torch", "x = 1"], "pass\n\nx = 1"),
        ([" !tts \\", "   --list"], "pass\n"),
        (["  x = 1", "  %time", "    # done"], "x = 1\npass\n  # done"),
        (["if x:", "    !ls"], "if x:\n    pass"),
        (["files = !ls", "x = 1"], "files = None\nx = 1"),
        (["t = %timeit -o f()"], "t = None"),
        (["torch.nn?", "?torch", "torch??"], "pass\npass\npass"),
        (["%%bash", "rm -rf /", "x = 1"], "\n\n"),
        (["", "%%writefile train.py", "bad("], "\n\n"),
        (["%%time", "x = 1"], "\nx = 1"),
        (["x = (a", "% b)"], "x = (a\n% b)"),
        (["s = '''", "%d", "!", "'''"], "s = '''\n%d\n!\n'''"),
        (["await f()"], "await f()"),
        ([], ""),
    ],
)
def test_magics_leave_as_many_lines(lines: list[str], left: str) -> None:
    assert read(code(*lines)).text == left


def test_a_cell_that_is_no_python_is_reported_and_the_others_are_read() -> None:
    data = notebook(code("bad()"), code("x = 1", "x = ("), code("bad()"))
    report = report_of({"n.ipynb": data})
    assert told(report.findings) == ["n.ipynb:cell 1:1:1 DL101", "n.ipynb:cell 3:1:1 DL101"]
    assert problems_of(data)[0].startswith(
        "n.ipynb:cell 2:2:5: the code cannot be parsed: '(' was never closed (read"
    )
    assert problems_of(notebook(code("x = '\ud800'")))[0].startswith(
        "n.ipynb:cell 1:1:1: the code cannot be parsed:"
    )


@pytest.mark.parametrize(
    "metadata", [{"kernelspec": {"language": "R"}}, {"language_info": {"name": "julia"}}]
)
def test_other_languages_are_passed_over(metadata: dict[str, Any]) -> None:
    assert read_notebook(PATH, notebook(code("x <- 1 +"), metadata=metadata)) == (None, [])


def test_without_code_there_is_nothing_to_read() -> None:
    assert read_notebook(PATH, notebook(TEXT)) == (None, [])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'{"cells": [', "it is not JSON (Expecting value: line 1 column 12 (char 11))"),
        (b"\xff", "it is not JSON ('utf-8' codec can't decode byte 0xff"),
        (b"[" * 100_000, "it is not JSON (it is nested too deeply"),
        (b"[1]", "its JSON is not an object"),
        (b"{}", "it has no list of cells"),
        (b'{"cells": 3}', "it has no list of cells"),
    ],
)
def test_what_is_no_notebook_is_reported(data: bytes, message: str) -> None:
    (said,) = problems_of(data)
    assert said.startswith(f"n.ipynb:1:1: the notebook cannot be read: {message}")


ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(max_size=5)
    | st.sampled_from(["code", "%x", "!", "x=("]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["cells", "cell_type", "source", "metadata", "language_info"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(ANYTHING, st.lists(ANYTHING, max_size=3))
def test_no_json_is_too_odd(document: Any, sources: list[Any]) -> None:
    read_notebook(PATH, json.dumps(document).encode())
    read_notebook(
        PATH, notebook(*({"cell_type": "code", "source": one} for one in sources), document)
    )


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        (["a\n", "b\n", "c"], [12, 13, 14]),
        (["a\n", "\n", "c\n"], [12, 13, 14]),
        ("a\nb\r\nc", [11, 11, 11]),
        (["a\nb\n", "c"], [12, 12, 13]),
    ],
)
def test_lines_of_a_cell_in_the_file(source: str | list[str], lines: list[int]) -> None:
    cells = [TEXT, {"cell_type": "code", "source": source}]
    data = json.dumps({"cells": cells}, indent=1).encode()
    assert [line_in_file(data, 2, line) for line in range(1, len(lines) + 1)] == lines


@pytest.mark.parametrize(
    ("lines", "count"),
    [
        (["import lightning as L", 'L.Trainer(strategy="ddp", devices=4)'], 1),
        (["import lightning as L", 'L.Trainer(strategy="ddp_notebook", devices=4)'], 0),
        (
            [
                "import torch.multiprocessing as mp",
                "def train(rank):",
                "    pass",
                "mp.spawn(train, nprocs=2)",
            ],
            1,
        ),
    ],
)
def test_ranks_do_not_start_from_a_notebook(lines: list[str], count: int) -> None:
    rules = all_rules()
    report = check(
        [read_bytes(PATH, notebook(code(*lines)))], rules, Settings(chosen=frozenset({"DL067"}))
    )
    assert [finding.rule for finding in report.findings] == ["DL067"] * count


def test_ranks_start_from_a_notebook_in_a_function_of_a_file() -> None:
    lines = ["import torch.multiprocessing as mp", "from work import train", "mp.spawn(train)"]
    rules = all_rules()
    readings = [read_bytes(Path("work.py"), b"def train(rank):\n    pass\n")]
    readings.append(read_bytes(PATH, notebook(code(*lines))))
    report = check(readings, rules, Settings(chosen=frozenset({"DL067"})))
    assert report.findings == []
