"""From bytes to Python or a script; what cannot be read is told with its place, and raises
nothing."""

from __future__ import annotations

import codecs
import sys
import warnings
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drumline_lint.reading.parse import Reading, language_of, read_bytes, read_file
from drumline_lint.reading.shell import Script
from drumline_lint.reading.source import Source

PYTHON = Path("train.py")


def only_problem(reading: Reading) -> str:
    (said,) = reading.problems
    assert reading.content is None
    assert (said.rule, said.name, said.severity) == ("DL000", "unreadable", "error")
    return f"{said.place}: {said.message}"


def source_of(data: bytes) -> Source:
    reading = read_bytes(PYTHON, data)
    assert isinstance(reading.content, Source), reading.problems
    return reading.content


@pytest.mark.parametrize(
    ("name", "data", "language"),
    [
        ("a.py", b"#!/bin/sh\n", "python"),
        ("a.ipynb", b"", "notebook"),
        ("a.sh", b"", "shell"),
        ("a.slurm", b"", "shell"),
        ("job.sbatch", b"", "shell"),
        ("job.yaml", b"", "yaml"),
        ("compose.yml", b"", "yaml"),
        ("Dockerfile", b"", "dockerfile"),
        ("Dockerfile.gpu", b"", "dockerfile"),
        ("train.dockerfile", b"", "dockerfile"),
        ("tool", b"#!/usr/bin/env bash\n", "shell"),
        ("tool", b"#!/bin/sh -e\n", "shell"),
        ("tool", b"#!/usr/bin/env python3\n", "python"),
        ("tool", b"#!/usr/bin/fish\n", "python"),
        ("tool.txt", b"x = 1\n", "python"),
    ],
)
def test_the_language_follows_from_name_and_first_line(
    name: str, data: bytes, language: str
) -> None:
    assert language_of(Path(name), data) == language


@pytest.mark.parametrize(
    ("data", "encoding", "value"),
    [
        ("x = 'é'".encode(), "utf-8", "é"),
        (codecs.BOM_UTF8 + "x = 'é'".encode(), "utf-8-sig", "é"),
        (b"# -*- coding: latin-1 -*-\nx = '\xe9'", "iso-8859-1", "é"),
        (b"#!/usr/bin/python\n# vim: set fileencoding=cp1251 :\nx = '\xe9'", "cp1251", "й"),
    ],
)
def test_the_encoding_is_found_as_python_finds_it(data: bytes, encoding: str, value: str) -> None:
    reading = read_bytes(PYTHON, data)
    assert reading.encoding == encoding
    assert isinstance(reading.content, Source)
    assert f"x = '{value}'" in reading.content.text
    assert not reading.content.text.startswith("\ufeff")


def test_line_ends_are_kept() -> None:
    assert source_of(b"x = 1\r\ny = 2\r\n").text == "x = 1\r\ny = 2\r\n"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"x = 1\ny = (\n", "train.py:2:5: the code cannot be parsed: '(' was never closed"),
        (
            b"if x:\npass\n",
            "train.py:2:1: the code cannot be parsed: expected an indented block after",
        ),
        (b"x = 1\n\0\n", "train.py:2:1: the file has null bytes, so it is not text"),
        (
            b"x = 1\ny = '\xff'\n",
            "train.py:2:1: the file is not utf-8: byte 0xff cannot be decoded",
        ),
        (
            b"# coding: martian\n",
            "train.py:1:1: the encoding of the file is not known: unknown encoding: martian",
        ),
        (
            b"# coding: hex\n",
            "train.py:1:1: the encoding of the file is not known: 'hex' is not a text encoding",
        ),
        (
            b"# coding: undefined\nx",
            "train.py:1:1: the encoding of the file is not known: ",  # then Python's own words
        ),
        (
            "x = 1".encode("utf-16"),
            "train.py:1:1: the file is not utf-8: byte 0xff cannot be decoded",
        ),
        (b"#\nx = '\xe9'\n", "train.py:2:1: the file is not utf-8: byte 0xe9 cannot be decoded"),
        (
            b"# coding: ascii\nx = '\xe9'",
            "train.py:2:1: the file is not ascii: byte 0xe9 cannot be decoded",
        ),
        (
            b"(" * 5000 + b")" * 5000,
            "train.py:1:201: the code cannot be parsed: too many nested parentheses",
        ),
        (b"-" * 500_000 + b"1", "train.py:1:1: the code is nested too deeply to be parsed"),
        (
            b"x = " + b"9" * 5000,
            "train.py:1:1: the code cannot be parsed: Exceeds the limit (4300 digits)",
        ),
    ],
)
def test_what_is_not_python_is_reported(data: bytes, message: str) -> None:
    assert only_problem(read_bytes(PYTHON, data)).startswith(message)


def test_the_python_version_is_named() -> None:
    this = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert only_problem(read_bytes(PYTHON, b"x = (")).endswith(
        f"'(' was never closed (read as Python {this})"
    )
    assert only_problem(read_bytes(PYTHON, b"print loss")).endswith("(it looks like Python 2)")


def test_a_file_that_cannot_be_opened_is_reported(tmp_path: Path) -> None:
    gone = read_file(tmp_path / "gone.py")
    assert only_problem(gone).endswith(
        "gone.py:1:1: the file cannot be opened: No such file or directory"
    )
    (tmp_path / "self.py").symlink_to("self.py")
    assert only_problem(read_file(tmp_path / "self.py")).endswith(
        "Too many levels of symbolic links"
    )
    (tmp_path / "folder.py").mkdir()
    folder = read_file(tmp_path / "folder.py")
    assert only_problem(folder).endswith("the file cannot be opened: Is a directory")


def test_nothing_is_reported_about_odd_escapes() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        source_of(b"x = '\\d'\ny = 1 is 1\n")


def test_scripts_are_read_whatever_their_bytes() -> None:
    reading = read_bytes(Path("run.sh"), codecs.BOM_UTF8 + b"echo \xff\r\n")
    assert isinstance(reading.content, Script)
    assert reading.content.text == "echo \udcff\r\n"
    assert reading.content.text.encode("utf-8-sig", "surrogateescape") == reading.data
    assert only_problem(read_bytes(Path("run.sh"), b"a\n\nb\0")).startswith(
        "run.sh:3:1: the file has null bytes"
    )


@given(st.binary(max_size=200), st.sampled_from(["x.py", "x.sh", "x.ipynb"]))
def test_any_bytes_are_read_or_told(data: bytes, name: str) -> None:
    reading = read_bytes(Path(name), data)
    assert reading.content is not None or reading.problems or name == "x.ipynb"
