"""A process whose exit blocks, in a destructor say, ends all the same, and with the code of what
came before."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import free_port, rank_environment

ROOT = Path(__file__).parents[2]
# Torch is loaded once; then every program runs in a fork, to the end of Python.
FORKS = """
import json, os, sys
from drumline.rank.group import limit_exit
pids = []
for program in json.loads(sys.argv[1]):
    if (pid := os.fork()) == 0:
        break
    pids.append(pid)
else:
    print("codes", *(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids))
    sys.exit()
exec(program)
"""
STUCK = """
import sys, time
class Stuck:
    def __del__(self, wait=time.sleep):
        wait(600)
"""
# Another one that exits late: with torch loaded, Python leaves some objects alone at its end.
LEAVES = """
import atexit, threading, time
atexit.register(time.sleep, 600)
import torch.distributed as dist
from drumline import DDPManager
from drumline.rank import group
group.LEAVE_S = 0.5
dist.destroy_process_group = lambda: threading.Event().wait()
with DDPManager() as ddp:
    pass
print("trained")
"""
PROGRAMS = {
    STUCK + "limit_exit(0.3, failed=False); stuck = Stuck()": 0,
    STUCK + "limit_exit(0.3, failed=True); stuck = Stuck()": 1,
    STUCK + "limit_exit(0.3, failed=False); stuck = Stuck(); raise ValueError": 1,
    STUCK + "limit_exit(60, failed=False); sys.exit(3)": 3,
    LEAVES: 0,
}


@pytest.mark.soak
def test_an_exit_that_blocks_is_cut_short() -> None:
    """Also that of a manager whose group is not destroyed."""
    done = subprocess.run(
        [sys.executable, "-c", FORKS, json.dumps(list(PROGRAMS))],
        env={**os.environ, "PYTHONPATH": str(ROOT), **rank_environment(0, 1, free_port())},
        capture_output=True,
        text=True,
        timeout=120,
    )
    codes = " ".join(map(str, PROGRAMS.values()))
    assert (done.returncode, done.stdout) == (0, f"trained\ncodes {codes}\n"), done.stderr
