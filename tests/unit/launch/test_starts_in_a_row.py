"""`drumline launch --keep-going` on this machine: the pauses between two starts, and signals in
them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from drumline.cli import launch_request
from drumline.cli.launch_request import LaunchRequest, NodeOutcome
from drumline.config import FlagValues
from drumline.launch.keep_going import next_pause_s
from drumline.launch.node import local
from drumline.launch.node_plan import NodePlan, Program

ROOT = Path(__file__).parents[3]
PROGRAM = Program(("train", "digits"), is_task=True)
# A start that found a full disk; then this process waits for space, which never comes.
WAIT = """
import signal
from drumline.cli.launch_request import LaunchRequest, NodeOutcome
from drumline.config import FlagValues
from drumline.launch import keep_going
from drumline.launch.node_plan import NodePlan, Program

def run_once(request, node, program):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGUSR1, lambda *_: None)  # of the agent that has ended
    return 1, NodeOutcome(full_disk="/run")

keep_going.has_space = lambda *_: False
LaunchRequest._run_once = run_once
request = LaunchRequest(FlagValues({"keep-going": True}), "digits", [])
request.run_node(NodePlan(), Program(("train", "digits"), is_task=True))
"""


class Clock:
    """Time passes in pauses, and in starts of one second."""

    def __init__(self) -> None:
        self.now = 0.0
        self.pauses: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds


def test_pauses_grow_while_starts_are_preempted_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    codes = iter([75] * 8 + [0])

    def run_once(*_: object) -> tuple[int, NodeOutcome]:
        clock.now += 1.0
        return next(codes), NodeOutcome()

    monkeypatch.setattr(launch_request, "time", clock)
    monkeypatch.setattr(LaunchRequest, "_run_once", run_once)
    monkeypatch.setattr(local, "exit_between_starts", lambda: None)
    monkeypatch.setenv("DRUMLINE_RESTARTED", "")
    assert (
        LaunchRequest(FlagValues({"keep-going": True}), "digits", []).run_node(NodePlan(), PROGRAM)
        == 0
    )
    assert clock.pauses == [0, 5, 15, 35, 60, 60, 60, 60]


def test_after_a_long_run_there_is_no_pause() -> None:
    assert next_pause_s(60.0, ran_s=61.0) == 0.0
    assert next_pause_s(0.0, ran_s=59.0) == 5.0


def test_a_signal_between_two_starts_ends_the_launch_with_a_message() -> None:
    outcomes = {
        signal.SIGTERM: (
            75,
            "drumline: stopped while no rank was running; rerun the same command to resume",
        ),
        signal.SIGUSR1: (
            75,
            "drumline: stopped while no rank was running; rerun the same command to resume",
        ),
        signal.SIGINT: (
            130,
            "drumline: interrupted while no rank was running; rerun the same command to resume",
        ),
    }
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    launches = {
        number: subprocess.Popen(
            [sys.executable, "-c", WAIT], stderr=subprocess.PIPE, text=True, env=environment
        )
        for number in outcomes
    }
    try:
        for number, (code, message) in outcomes.items():
            launch = launches[number]
            assert launch.stderr is not None
            assert "the disk of /run is full" in launch.stderr.readline()
            launch.send_signal(number)
            _, errors = launch.communicate(timeout=60)
            assert (launch.returncode, errors.strip()) == (code, message)
    finally:
        for launch in launches.values():
            launch.kill()
            launch.communicate()
