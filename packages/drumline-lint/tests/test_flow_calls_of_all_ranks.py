"""The call through which all ranks come to a save is named, where it is in another place."""

from __future__ import annotations

import pytest

from reading_cases import findings_in

KEEPING = """\
import torch
import torch.distributed as dist
def write(state): torch.save(state, 'a.pt')
def keep(state): write(state)
"""
GUARDED = """\
def keep_also(state):
    if dist.get_rank() == 0:
        write(state)
"""
USES = """\
import torch.distributed as dist
from keeping import keep
def train(state):
    dist.barrier()
    if dist.get_rank() == 0:
        keep(state)
def restart(state):
    keep(state)
"""
SWITCHED = """\
import torch
import torch.distributed as dist
def finish(state, save=False):
    if save:
        torch.save(state, 'a.pt')
def main(state):
    dist.barrier()
    finish(state)
    finish(state, True)
"""
BEFORE = "torch.save runs on every rank"
AFTER = " and writes 'a.pt'"


def said(**files: str) -> list[str]:
    found = findings_in(tuple((f"{name}.py", text) for name, text in files.items()))
    return [one.message for one in found if one.rule == "DL014"]


@pytest.mark.parametrize(
    ("files", "how"),
    [
        ({"a": KEEPING + "dist.barrier()\nwrite({})\n"}, ""),
        (
            {"a": KEEPING + "def train():\n    dist.barrier()\n    write({})\n"},
            ", through train (line 7),",
        ),
        (
            {"keeping": KEEPING, "a": USES + "train({})\nrestart({})\n"},
            ", through restart (a.py, line 8),",
        ),
        ({"keeping": KEEPING, "a": USES + "train({})\nkeep({})\n"}, ", through a.py, line 10,"),
        ({"a": SWITCHED + "main({})\n"}, ", through main (line 9),"),
        (
            {"keeping": KEEPING + GUARDED, "a": USES + "train({})\nrestart({})\n"},
            ", through restart (a.py, line 8),",
        ),
    ],
)
def test_who_lets_all_ranks_come(files: dict[str, str], how: str) -> None:
    assert said(**files) == [BEFORE + how + AFTER]


def test_a_function_that_calls_itself_is_not_named() -> None:
    text = "def train(n):\n    dist.barrier()\n    torch.save({}, 'a.pt')\n    train(n - 1)\n"
    assert said(a=KEEPING + text + "train(3)\n") == [BEFORE + AFTER]
