"""The code of a notebook: its cells joined, without IPython's magics."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from drumline_lint.findings import UNREADABLE, Finding, problem
from drumline_lint.reading.source import CANNOT_PARSE, Cell, Source, parse_python, syntax_problem
from drumline_lint.untrusted import parse_json

# A magic of a cell whose code is Python; `%%bash` is another.
_PYTHON_BELOW = re.compile(r"%%(?:time|timeit|capture|prun|python3?)\b")
# `%matplotlib inline`, `!pip install x`, `x?`; `files = !ls`.
_MAGIC = re.compile(r"(?P<indent>\s*)(?:[%!?]|[\w.]+\?{1,2}\s*$)")
_ASSIGNED = re.compile(r"(?P<target>[\w.,\s\[\]'\"]+=\s*)(?:!|%[a-zA-Z])")


def read_notebook(path: Path, data: bytes) -> tuple[Source | None, list[Finding]]:
    """Its Python, if there is any, and problems for cells that are not Python.

    Cells are joined with line ends, and each is known by its first line:

        {"cells": [{"cell_type": "code", "source": ["import torch\\n", "torch.rand(2)"]}]}
    """
    try:
        codes = list(_code_cells(_document(data)))
    except ValueError as reason:
        return None, [problem(UNREADABLE, path, f"the notebook cannot be read: {reason}")]

    problems: list[Finding] = []
    texts: list[str] = []
    cells: list[Cell] = []
    first_line = 1

    for number, code in codes:
        text, error = _as_python(code)
        if error is not None:
            problems.append(syntax_problem(error, path, cell=number))
        cells.append(Cell(number, first_line))
        texts.append(text)
        first_line += text.count("\n") + 1

    if not cells:
        return None, problems

    whole = "\n".join(texts)
    try:
        tree = parse_python(whole)
    except CANNOT_PARSE as error:
        return None, [*problems, syntax_problem(error, path)]
    return Source(path, whole, tree, cells), problems


def _document(data: bytes) -> dict[str, Any]:
    """Raises ValueError if it is no notebook."""
    try:
        document = parse_json(data)
    except ValueError as error:
        raise ValueError(f"it is not JSON ({error})") from None

    if not isinstance(document, dict):
        raise ValueError("its JSON is not an object")

    return document


def _code_cells(document: dict[str, Any]) -> Iterator[tuple[int, str]]:
    """Number and code of each code cell; all cells are counted, from 1. Empty for languages other
    than Python."""
    if not _is_python(document):
        return
    if not isinstance(document.get("cells"), list):
        raise ValueError("it has no list of cells")

    for number, cell in enumerate(document["cells"], start=1):
        if _dict(cell).get("cell_type") == "code":
            yield number, _joined(cell.get("source", ""))


def _is_python(document: dict[str, Any]) -> bool:
    """Whether the notebook names Python, or no language."""
    metadata = _dict(document.get("metadata"))
    of_kernel = _dict(metadata.get("kernelspec")).get("language")
    language = _dict(metadata.get("language_info")).get("name") or of_kernel

    return not isinstance(language, str) or "python" in language.lower()


def _dict(value: Any) -> dict[str, Any]:
    """The value if it is a dict; a notebook may have anything in its place."""
    return value if isinstance(value, dict) else {}


def _joined(code: Any) -> str:
    """The code of a cell, which is a text or a list of lines."""
    lines = code if isinstance(code, list) else [code]
    text = "".join(line for line in lines if isinstance(line, str))

    return re.sub(r"\r\n?", "\n", text)


def _as_python(code: str) -> tuple[str, BaseException | None]:
    """The code, or as many empty lines if it is not Python even without magics."""
    if _parse_error(code) is None:
        return code, None

    without = _without_magics(_without_indent(code))
    error = _parse_error(without)
    if error is None:
        return without, None
    return "\n" * code.count("\n"), error


def _without_indent(code: str) -> str:
    """IPython takes the indent of a cell's first line from all of its lines."""
    indent = code[: len(code) - len(code.lstrip(" \t"))]
    return "\n".join(line.removeprefix(indent) for line in code.split("\n"))


def _parse_error(text: str) -> BaseException | None:
    """Why it cannot be parsed; None if it can."""
    try:
        parse_python(text)
    except CANNOT_PARSE as error:
        return error
    return None


def _without_magics(code: str) -> str:
    """The same number of lines. Python could not parse the code, so a `%` at the start of a line is
    a magic.

    - `%matplotlib inline` and `!pip install x` become `pass`
    - `files = !ls` becomes `files = None`
    - of a cell that begins with `%%bash` nothing is left
    """
    lines = code.split("\n")
    first = next((number for number, line in enumerate(lines) if line.strip()), 0)
    if lines[first].startswith("%%"):
        if not _PYTHON_BELOW.match(lines[first]):
            return "\n" * code.count("\n")
        lines[first] = ""

    is_continued = False  # whether the line belongs to a magic above it
    for number, line in enumerate(lines):
        ends_open = line.rstrip().endswith("\\")
        if is_continued:
            lines[number] = ""
        elif magic := _MAGIC.match(line):
            lines[number] = f"{magic['indent']}pass"
        elif magic := _ASSIGNED.match(line):
            lines[number] = f"{magic['target']}None"
        else:
            ends_open = False

        is_continued = ends_open

    return "\n".join(lines)


def line_in_file(data: bytes, cell: int | None, line: int) -> int:
    """The line of the file on which a line of a notebook's cell is written; of other files, the
    line itself."""
    if cell is None:
        return line

    lines = _lines_of_cells(data).get(cell) or [1]
    return lines[min(max(line, 1), len(lines)) - 1]


@lru_cache(maxsize=4)
def _lines_of_cells(data: bytes) -> dict[int, list[int]]:
    """By the number of the cell: for each of its lines, the line of the file.

    Usually each line of a cell is a text of its own; a text of several lines is on one line.
    """
    written = data.decode("utf-8-sig")
    lines: dict[int, list[int]] = {}
    position = 0
    line_number = 1

    for number, cell in enumerate(_document(data).get("cells", []), start=1):
        source = _dict(cell).get("source", "")
        for text in source if isinstance(source, list) else [source]:
            if not isinstance(text, str) or not text:
                continue

            start = max(written.find(form, position) for form in _json_forms(text))
            if start >= 0:
                line_number += written.count("\n", position, start)
                position = start + 1
                lines.setdefault(number, []).extend([line_number] * len(text.splitlines()))

    return lines


def _json_forms(text: str) -> list[str]:
    """How JSON may have a text: with its letters, or with escapes in ASCII."""
    return [json.dumps(text, ensure_ascii=is_ascii) for is_ascii in (False, True)]
