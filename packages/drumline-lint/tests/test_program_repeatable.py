"""The same files give the same findings in every process: what may be several things is gone
through in one order."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent
ASKING = """\
from test_program_values import asked, program_of

values = asked(program_of({"main": '''
import torch

def one(): return torch.ones(2)
def two(): return 0

class Three: pass

made = torch.cuda.amp.autocast
if torch.npu:
    made = torch.npu.amp.autocast
elif one():
    made = one
elif two():
    made = two
elif Three():
    made = Three() or Three or "text" or 3 or None or torch.nn.Linear(2, 2) or torch.nn
ask(made)
'''}))
print([type(value).__name__ + str(hash(value)) for value in values])
"""


def order(seed: int) -> str:
    """In a process of its own, where text has other hashes and nodes are in other places."""
    done = subprocess.run(
        [sys.executable, "-c", f"kept = [bytearray(1) for _ in range({seed * 1000})]\n{ASKING}"],
        env={
            **os.environ,
            "PYTHONHASHSEED": str(seed),
            "PYTHONPATH": f"{TESTS.parent}{os.pathsep}{TESTS}",
        },
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return done.stdout


def test_the_order_is_that_of_the_text() -> None:
    first = order(1)
    assert "Library" in first
    assert [order(seed) for seed in (2, 3)] == [first, first]
