"""What is printed: everything visible, one line where one is meant, in whatever encoding the stream
has."""

from __future__ import annotations

import io
import logging
import os
import subprocess
import sys

import pytest

from drumline.base.errors import DrumlineError, as_list, log
from drumline.base.text import coloured_line, make_console, one_line, paragraph, shown


@pytest.mark.parametrize(
    ("text", "visible"),
    [
        ("\x1b[31m\a\b\r\x7f", r"\x1b[31m\x07\x08\r\x7f"),
        ("\x9b2J\u2028\u202e\ufeff", r"\x9b2J\u2028\u202e\ufeff"),
        ("\udc9b\U000e0041", r"\udc9b\U000e0041"),
        ("größe\t漢字 🥁 a\xa0b\n می‌خواهم", "größe\t漢字 🥁 a\xa0b\n می‌خواهم"),
    ],
)
def test_what_a_terminal_would_obey_is_visible_and_letters_stay(text: str, visible: str) -> None:
    assert shown(text) == visible
    assert shown(visible) == visible, "twice is as once"
    assert one_line(text) == visible.replace("\n", r"\n")


def test_colours_of_ranks_end_with_their_line() -> None:
    assert coloured_line("plain") == "plain"
    assert coloured_line("\x1b[31mred") == "\x1b[31mred\x1b[0m"
    assert coloured_line("\x1b[>4;2m\x1b[2J\n") == r"\x1b[>4;2m\x1b[2J\n"


def test_lines_below_a_line_of_ours_are_indented() -> None:
    assert paragraph("a\nb", "c\nd", "", "try: e") == "drumline: a\\nb\n  c\\nd\n\n  try: e\n"


def test_what_rich_draws_is_harmless_before_it_is_laid_out() -> None:
    stream = io.StringIO()
    console = make_console(stream, width=20)
    console.print("[bold]a[/bold]\x1b[2J:drum:")
    assert stream.getvalue() == "[bold]a[/bold]\\x1b[2\nJ:drum:\n"


def test_a_value_in_an_error_begins_no_line() -> None:
    error = DrumlineError(
        as_list("2 things\nnext: x", ["a\n  - b", "c"]), next_step="do\n  try: evil"
    )
    assert error.lines() == [r"2 things\nnext: x", r"- a\n  - b", "- c", r"try: do\n  try: evil"]
    assert str(error) == "\n  ".join(error.lines())


def test_a_warning_is_one_line_and_a_traceback_below_it_indented(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log.warning("a\nb\x07")
    log.warning(DrumlineError("full", next_step="free some"))
    try:
        raise ValueError("x\ndrumline: y")
    except ValueError:
        log.exception("it failed")
    first, second, third = (record.getMessage() for record in caplog.records)
    assert (first, second) == (r"a\nb\x07", "full. Try: free some")
    assert third.startswith("it failed\n  Traceback (most recent call last):\n")
    assert third.endswith("\n  ValueError: x\n  drumline: y")
    assert caplog.records[2].levelno == logging.ERROR


@pytest.mark.parametrize("words", [["--help"], ["train", "--help"], ["lint", "--list"]])
def test_a_reader_that_leaves_is_no_failure(words: list[str]) -> None:
    ours, theirs = os.pipe()
    os.close(ours)  # as `| head` does when it has seen enough
    with os.fdopen(theirs, "wb") as closed:
        command = [sys.executable, "-m", "drumline", *words]
        ended = subprocess.run(
            command, stdout=closed, stderr=subprocess.PIPE, text=True, check=False
        )
    assert (ended.returncode, ended.stderr) == (0, "")


def test_what_a_thread_or_a_task_raises_steers_no_terminal() -> None:
    code = (
        "import asyncio, threading\n"
        "from drumline.base.errors import report_uncaught_errors\n"
        "report_uncaught_errors()\n"
        "def fail(): raise ValueError('\\x1b]52;c;eA==\\a\\ndrumline: all is well')\n"
        "async def fail_later(): fail()\n"
        "async def main(): asyncio.create_task(fail_later()); await asyncio.sleep(0.1)\n"
        "thread = threading.Thread(target=fail); thread.start(); thread.join()\n"
        "asyncio.run(main())\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert "\x1b" not in ended.stderr
    lines = [line for line in ended.stderr.splitlines() if line.startswith("drumline: ")]
    assert [line.partition("ValueError")[0] for line in lines] == [
        "drumline: error: a thread failed: ",
        "drumline: Task exception was never retrieved",
    ]
