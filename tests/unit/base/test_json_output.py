"""`log.format json`: every line that a command or its ranks print is a JSON object."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from drumline.base.errors import ExitCode
from drumline.base.json_output import FORMAT, IS_WRAPPED, as_objects
from drumline.base.processes import EXITED, state_of

TRACEBACK = """\
Traceback (most recent call last):
  File "train.py", line 3, in <module>
    main()

ValueError: bad label
"""
WRAPS = "from drumline.base.json_output import wrap_output; wrap_output()\n"


def objects(*lines: str, **fields: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in as_objects(lines, fields)]


def run(program: str, **variables: str) -> subprocess.CompletedProcess[str]:
    own = {name: text for name, text in os.environ.items() if name not in (FORMAT, IS_WRAPPED)}
    return subprocess.run(
        [sys.executable, "-c", WRAPS + program],
        env={**own, FORMAT: "json", **variables},
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip


def test_a_message_with_its_details_is_one_object() -> None:
    (error,) = objects("drumline: error: it failed", "  try: this", host="a", rank=3)
    assert error["message"] == "error: it failed\n  try: this"
    assert (error["level"], error["host"], error["rank"]) == ("error", "a", 3)
    assert error["time"].endswith("+00:00")


def test_a_traceback_is_one_object_and_what_follows_another() -> None:
    lines = [line for line in TRACEBACK.splitlines() if line]
    first, second = objects(*lines, "next")
    assert first["level"] == "error"
    assert first["message"].endswith("ValueError: bad label")
    assert second["message"] == "next"


@pytest.mark.parametrize(
    ("line", "level"),
    [
        ("drumline: warning: slow", "warning"), ("drumline: stall: rank 1", "warning"),
        ("drumline: hang: rank 1", "error"), ("loss: 3", "info"), ("errors: none", "info"),
    ],
)  # fmt: skip
def test_the_level_is_the_first_word(line: str, level: str) -> None:
    assert objects(line)[0]["level"] == level


def test_an_object_keeps_its_fields() -> None:
    assert objects('{"host": "mine", "x": 1}', host="a") == [{"host": "mine", "x": 1}]
    (line,) = as_objects(['{"host": "mine", "x": 1}'], {"host": "a"}, is_authority=True)
    assert json.loads(line) == {"host": "a", "x": 1}


@pytest.mark.parametrize(
    "line", ["[1, 2]", "{broken", "{}}", '{"a": ' * 500, "\x1b[31mred", "é\u202e"]
)
def test_anything_else_is_wrapped_in_ascii(line: str) -> None:
    (text,) = as_objects([line], {})
    assert text.isascii()
    assert json.loads(text)["message"] == line.rstrip()


def test_all_that_a_process_and_its_children_print_is_wrapped() -> None:
    done = run(
        "import os, subprocess\nprint('hello', flush=True)\nos.write(2, b'from C\\n')\n"
        "subprocess.run(['echo', 'child'])\nprint('{\"x\": 1}')\nprint('no newline', end='')",
        RANK="3",
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line.get("message") for line in lines] == ["hello", "from C", "child", None, "no newline"]  # fmt: skip
    assert {line["rank"] for line in lines} == {3}
    assert (done.returncode, done.stderr) == (0, "")


def test_it_ends_as_the_command_does() -> None:
    done = run("raise SystemExit(75)")
    assert done.returncode == ExitCode.PREEMPTED
    done = run("import os; os.kill(os.getpid(), 9)")
    assert done.returncode == -signal.SIGKILL
    failed = run("raise ValueError('bad')")
    assert failed.returncode == 1
    (line,) = failed.stdout.splitlines()
    assert json.loads(line)["message"].endswith("ValueError: bad")


def test_it_does_not_wait_for_what_a_command_leaves_running() -> None:
    began = time.monotonic()
    done = run(
        "import subprocess; left = subprocess.Popen(['sleep', '20'], start_new_session=True); print(left.pid)"
    )
    left = int(json.loads(done.stdout)["message"])
    os.kill(left, signal.SIGKILL)
    assert time.monotonic() - began < 20


def test_a_command_that_prints_all_the_time_is_shown_at_once() -> None:
    """And what it leaves behind, which prints on, does not keep it from ending."""
    forever = "import time\nwhile True:\n    print(0, flush=True)\n    time.sleep(0.01)"
    program = (
        f"import subprocess, sys, time\nwords = [sys.executable, '-c', {forever!r}]\n"
        "left = subprocess.Popen(words, start_new_session=True)\n"
        "print('pid', left.pid, flush=True)\ntime.sleep(1)"
    )
    done = run(program)
    messages = [json.loads(line)["message"] for line in done.stdout.splitlines()]
    (left,) = [int(message.split()[1]) for message in messages if message.startswith("pid ")]
    os.kill(left, signal.SIGKILL)
    assert done.returncode == 0
    times = {json.loads(line)["time"] for line in done.stdout.splitlines()}
    assert len(times) > 2, "more than one batch"


def test_of_a_progress_bar_the_last_state_is_kept() -> None:
    done = run("print('1%\\r50%\\r100%\\r')")
    assert json.loads(done.stdout)["message"] == "100%"


def test_a_signal_reaches_the_command_and_a_kill_ends_it(tmp_path: Path) -> None:
    program = (
        WRAPS + "import os, signal, sys, time\n"
        "def end(number, frame): print('asked to stop', flush=True); sys.exit(75)\n"
        "signal.signal(signal.SIGTERM, end)\nprint(os.getpid(), flush=True)\ntime.sleep(60)"
    )
    for number, code in ((signal.SIGTERM, 75), (signal.SIGKILL, -9)):
        process = subprocess.Popen(
            [sys.executable, "-c", program],
            env={**os.environ, FORMAT: "json"},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        child = int(json.loads(process.stdout.readline())["message"])
        process.send_signal(number)
        rest = process.stdout.read()
        assert process.wait(30) == code
        assert ("asked to stop" in rest) == (number == signal.SIGTERM)
        end = time.monotonic() + 30
        process.stdout.close()
        while state_of(child) not in EXITED and time.monotonic() < end:
            time.sleep(0.01)
        assert state_of(child) in EXITED


def test_a_second_one_leaves_it_to_the_first() -> None:
    done = run("wrap_output(); wrap_output(); print('once')")
    assert [json.loads(line)["message"] for line in done.stdout.splitlines()] == ["once"]
    plain = run("print('as it is')", **{IS_WRAPPED: "1"})
    assert plain.stdout == "as it is\n"
