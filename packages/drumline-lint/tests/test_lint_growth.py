"""Twice as many files take about twice the work, also where all of them belong to one program."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest

from drumline_lint.linter import all_docs, run_rules
from drumline_lint.reading.parse import read_bytes
from drumline_lint.rules import all_rules
from drumline_lint.settings import Settings
from reading_cases import findings_in

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


def words_of_one_line(count: int) -> tuple[tuple[str, str], ...]:
    text = (
        "import torch\nimport torch.distributed as dist\n"
        f"words = '{'python ' * count}'\ndist.init_process_group('nccl')\n"
        "net = torch.nn.parallel.DistributedDataParallel(net)\nnet(x).backward()\n"
        "torch.save(net.module.state_dict(), 'last.pt')\nif __name__ == '__main__':\n    main()\n"
    )
    return (("train.py", text), ("old.py", text), ("run.sh", "torchrun train.py\n"))


def words_of_a_docstring(count: int) -> tuple[tuple[str, str], ...]:
    text = (
        "import torch.distributed as dist\n"
        f"def prepare():\n    '{'takes ' * count}'\n"
        "dist.init_process_group('nccl')\nif dist.get_rank() == 0:\n    prepare()\ndist.barrier()\n"
    )
    return (("train.py", text),)


def here_documents(count: int) -> tuple[tuple[str, str], ...]:
    return (("run.sh", "torchrun train.py\nbash work.sh\n" + "f() { cat <<E\n" * count),)


def seconds_of(files: tuple[tuple[str, str], ...]) -> float:
    start = time.process_time()
    findings_in(files)
    return time.process_time() - start


@pytest.mark.parametrize(
    ("files", "count"),
    [(words_of_one_line, 500), (words_of_a_docstring, 600), (here_documents, 400)],
)
def test_the_time_grows_with_the_length_of_a_file(
    files: Callable[[int], tuple[tuple[str, str], ...]], count: int
) -> None:
    """Eight times as long takes 64 times as long where every word is compared with every other."""
    findings_in(files(1))  # what is done once for all
    assert seconds_of(files(8 * count)) < 30 * seconds_of(files(count))
