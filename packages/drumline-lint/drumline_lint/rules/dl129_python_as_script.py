"""DL129: a launcher gets `python` as its training script."""

from __future__ import annotations

import re
from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.reading.launchers import PYTHON, Launch, launches
from drumline_lint.reading.shell import Script

RULE = rule("DL129")
_INTERPRETER = re.compile(r"(?:.*/)?python[0-9.]*")


def check_shell(script: Script) -> Iterator[Finding]:
    for launch in launches(script):
        if launch.kind == PYTHON or not launch.arguments or "no-python" in launch.flags:
            continue
        training = launch.arguments[0]
        if message := _misnamed(launch, training.plain or ""):
            yield RULE.at(script, training, message)
        if _INTERPRETER.fullmatch(training.plain or ""):
            message = (
                f"{launch.kind} starts Python itself: it runs a script called {training.plain}"
            )
            yield RULE.at(script, training, message)


def _misnamed(launch: Launch, training: str) -> str:
    """`-m train.py`, or a shell script."""
    if "module" in launch.flags and re.fullmatch(r"[\w./-]+\.py", training):
        return f"-m takes the name of a module, not the file {training}"
    if re.fullmatch(r"[\w./-]+\.(?:sh|bash)|torchrun|deepspeed|accelerate", training):
        return f"{launch.kind} runs {training} with Python"
    return ""
