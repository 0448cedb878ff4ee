"""The stand-in for Python in these tests is like Python: what it is given, what it gives back, how
it ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.warm import warm_python

SCRIPT = """
import json, os, subprocess, sys, time
assert "torch" in sys.modules
match sys.argv[1]:
    case "say":
        said = [os.getcwd(), os.environ.get("NOTE"), sys.argv[2:], sys.stdin.read(), os.getpgrp() == os.getpid()]
        print(json.dumps(said))
        print("an error", file=sys.stderr)
    case "start":
        sys.exit(subprocess.run([sys.executable, *sys.argv[2:]]).returncode)
    case "file":
        os.write(int(sys.argv[2]), b"%d" % os.getppid())
        print("at once")
        time.sleep(60)
    case "exit":
        sys.exit(int(sys.argv[2]))
    case "die":
        os.kill(os.getpid(), 9)
    case "raise":
        raise ValueError("no")
    case "wait":
        print("waiting", flush=True)
        time.sleep(60)
"""


def test_it_is_like_python(tmp_path: Path, warm: None) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)

    def run(*words: str, stdin: str = "", **more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "script.py", *words]
        environment = {**os.environ, **more}
        return subprocess.run(
            command,
            cwd=tmp_path,
            env=environment,
            input=stdin,
            capture_output=True,
            text=True,
            check=False,
        )

    result = run("say", "a b", "", stdin="typed", NOTE="n")
    assert (result.returncode, result.stderr) == (0, "an error\n")
    assert result.stdout.startswith(f'["{tmp_path}", "n", ["a b", ""], "typed"')
    assert '", null, []' in run("say").stdout, "nothing of the process before is left"
    assert run("exit", "7").returncode == 7
    assert run("die").returncode == -signal.SIGKILL
    raised = run("raise")
    assert raised.returncode == 1
    assert raised.stderr.endswith("ValueError: no\n")
    assert run("start", "script.py", "exit", "5").returncode == 5, "what it starts has torch too"
    assert run("start", "-c", "import sys; sys.exit('torch' in sys.modules)").returncode == 0, (
        "but not always"
    )
    reading, writing = os.pipe()
    with subprocess.Popen(
        [sys.executable, "script.py", "file", str(writing)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        pass_fds=[writing],
    ) as given:
        os.close(writing)
        assert given.stdout is not None
        assert given.stdout.readline() == b"at once\n"
        given.kill()
    with open(reading, "rb") as file:  # noqa: PTH123
        assert file.read() == b"%d" % os.getpid(), "its parent, in a file that it was given"
    code = ["-P", "-c", "import sys; sys.exit('torch' in sys.modules)"]
    assert run("start", *code).returncode == 1, "a sidecar is warm"
    with socket.socket() as listener:
        cold = subprocess.run([sys.executable, *code], pass_fds=[listener.fileno()], check=False)
    assert cold.returncode == 0, "but one with a socket is not"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_what_it_stands_for(
    tmp_path: Path, warm: None, number: signal.Signals
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    with subprocess.Popen(
        [sys.executable, "script.py", "wait"], cwd=tmp_path, stdout=subprocess.PIPE
    ) as one:
        assert one.stdout is not None
        assert one.stdout.readline() == b"waiting\n"
        one.send_signal(number)
        assert one.stdout.read() == b"", "nobody holds the pipe any more"
    assert one.returncode == -number


def test_what_is_left_is_reported(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    with pytest.raises(AssertionError, match="the test left processes behind"):
        leave_one(tmp_path)


def leave_one(folder: Path) -> None:
    with ExitStack() as warm:
        python = warm.enter_context(warm_python(folder / "bin", patience_s=0.5))
        with subprocess.Popen(
            [python, "script.py", "wait"], cwd=folder, stdout=subprocess.PIPE
        ) as left:
            assert left.stdout is not None
            assert left.stdout.readline() == b"waiting\n"
            warm.close()
