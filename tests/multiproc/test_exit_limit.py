"""A process whose exit blocks, in a destructor say, ends all the same, and with the code of what came before."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import free_port, rank_environment

ROOT = Path(__file__).parents[2]
STUCK = """
import sys, time
class Stuck:
    def __del__(self, wait=time.sleep):
        wait(600)
"""
LIMITED = "from drumline.distributed.group import limit_exit\nlimit_exit({}, failed={})\n"
# Another one that exits late: with torch loaded, Python leaves some objects alone at its end.
LEAVES = """
import atexit, threading, time
atexit.register(time.sleep, 600)
import torch.distributed as dist
from drumline import DDPManager
from drumline.distributed import group
group.LEAVE_S = 0.5
dist.destroy_process_group = lambda: threading.Event().wait()
with DDPManager() as ddp:
    pass
print("trained")
"""


def run(program: str, **variables: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(ROOT), **variables},
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    ("program", "code"),
    [
        (LIMITED.format(0.3, False) + "stuck = Stuck()", 0),
        (LIMITED.format(0.3, True) + "stuck = Stuck()", 1),
        (LIMITED.format(0.3, False) + "stuck = Stuck(); raise ValueError", 1),
        (LIMITED.format(60, False) + "sys.exit(3)", 3),
    ],
)
def test_an_exit_that_blocks_is_cut_short(program: str, code: int) -> None:
    assert run(STUCK + program) == (code, "")


def test_a_manager_whose_group_is_not_destroyed_limits_the_exit() -> None:
    assert run(LEAVES, **rank_environment(0, 1, free_port())) == (0, "trained\n")
