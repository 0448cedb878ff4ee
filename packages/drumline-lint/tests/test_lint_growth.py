"""Twice as many files take about twice the work, also where all of them belong to one program."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

from drumline_lint.linter import all_docs, run_rules
from drumline_lint.reading.parse import read_bytes
from drumline_lint.rules import all_rules
from drumline_lint.settings import Settings

COMMON = """
import torch.distributed as dist

def is_main():
    return dist.get_rank() == 0

def wait():
    dist.barrier()
"""
STEP = """
import torch
import torch.distributed as dist
from common import is_main, wait

def train_{number}(model, loader, optimizer, args):
    for batch in loader:
        if is_main() and args.verbose:
            print(batch)
        loss = model(batch)
        loss.backward()
        optimizer.step()
    save_{number}(model, args)

def save_{number}(model, args):
    if is_main():
        torch.save(model.state_dict(), args.path)
    wait()
    return torch.load(args.path)

if __name__ == "__main__":
    dist.init_process_group("nccl")
    train_{number}(*make())
"""


def num_calls(num_files: int) -> int:
    """How many functions are called to check a program of so many files."""
    texts = {"common.py": COMMON}
    texts |= {f"step{number}.py": STEP.format(number=number) for number in range(num_files)}
    readings = [read_bytes(Path(name), text.encode()) for name, text in texts.items()]
    rules = all_rules()
    count = 0

    def see(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(see)
    try:
        results = run_rules(readings, rules, Settings(chosen=frozenset(all_docs(rules))))
    finally:
        sys.setprofile(None)
    assert not results.problems
    return count


def test_the_work_grows_with_the_number_of_files() -> None:
    num_calls(1)  # what is done once for all
    assert num_calls(32) < 2.2 * num_calls(16)
