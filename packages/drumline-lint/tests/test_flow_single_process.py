"""Which scripts are run in one process: the call of `here()` in each of these."""

from __future__ import annotations

import ast
from pathlib import Path
from textwrap import dedent

import pytest

from drumline_lint.flow.guards import is_on_every_rank
from drumline_lint.flow.single_process import is_single_process
from drumline_lint.program.program import Program
from drumline_lint.reading.source import Source

TRAIN = """
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
import data

def train(model):
    if dist.is_initialized():
        model = DDP(model)
    data.load()

def run():
    dist.init_process_group()
    train(1)

if __name__ == "__main__":
    run()
"""
DATA = """
import torch.distributed as dist

def load():
    if dist.is_initialized():
        dist.barrier()

def prepare():
    load()
    here()
"""


def _place(data: str, train: str = TRAIN) -> tuple[Program, ast.Call]:
    texts = {"train.py": train, "data.py": dedent(data)}
    program = Program([Source(Path(name), text, ast.parse(text)) for name, text in texts.items()])
    (call,) = [call for one in program.sources for call in program.index(one).calls.get("here", ())]
    return program, call


SCRIPT = 'if __name__ == "__main__":\n    '
LONE = {
    "the script part of a file that training imports": f"{DATA}{SCRIPT}prepare()",
    "there itself": f"import torch.distributed as dist\ndef load():\n    dist.barrier()\n{SCRIPT}here()",
    "in a process of its own": f"{DATA}from multiprocessing import Process\n{SCRIPT}Process(target=prepare).start()",
    "a script that calls the training itself": f"from train import train\ndef load():\n    pass\n"
    f"def sweep():\n    train(0)\n    here()\n{SCRIPT}wandb.init()\n    sweep()",
}


@pytest.mark.parametrize("name", LONE)
def test_a_run_that_starts_no_group_is_one_process(name: str) -> None:
    program, call = _place(LONE[name])
    assert not is_on_every_rank(program, call)
    assert is_single_process(program, call)


OF_RANKS = {
    "it starts a group": f"{DATA}{SCRIPT}dist.init_process_group()\n    prepare()",
    "it may start one": f"{DATA}import lib\n{SCRIPT}lib.init_distributed()\n    prepare()",
    "it may start one, in capitals": f"{DATA}import lib\n{SCRIPT}lib.initDDP()\n    prepare()",
    "by a function of the files that is not seen": f"{DATA}{SCRIPT}run = find()\n    run()\n    prepare()",
    "training comes there too": DATA.replace("def load():", "def load():\n    prepare()").replace(
        "    load()\n    here()", "    here()"
    )
    + f"{SCRIPT}prepare()",
    "it wraps what nobody else does": f"{DATA}from torch.nn.parallel import DistributedDataParallel as DDP\n"
    f"{SCRIPT}DDP(1)\n    prepare()",
}


@pytest.mark.parametrize("name", OF_RANKS)
def test_other_runs_are_of_ranks(name: str) -> None:
    program, call = _place(OF_RANKS[name])
    assert is_on_every_rank(program, call)


def test_where_nobody_is_seen_to_start_a_group_nothing_is_known() -> None:
    program, call = _place(
        f"{DATA}{SCRIPT}prepare()", TRAIN.replace("dist.init_process_group()", "pass")
    )
    assert is_on_every_rank(program, call)
