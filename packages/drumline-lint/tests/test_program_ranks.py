"""Which expressions are ranks, and what conditions say of them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from drumline_lint.program.functions import returned
from drumline_lint.program.program import Program
from drumline_lint.program.value import Rank, RankTest
from drumline_lint.reading.source import Source

BEFORE = """\
import os
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from somewhere import is_primary, helpers
from accelerate import Accelerator

rank = dist.get_rank()
local_rank = int(os.environ["LOCAL_RANK"])
node_rank = int(os.environ["GROUP_RANK"])
mesh = init_device_mesh("cuda", (2, 4))
accelerator = Accelerator()
is_it = rank == 0
args = parse()
"""
MAIN = RankTest("global", True)
OTHERS = RankTest("global", False)
SOME = RankTest("global", None)


def values(expression: str) -> set[object]:
    text = f"{BEFORE}answer = {expression}\n"
    source = Source(Path("a.py"), text, ast.parse(text))
    program = Program([source])
    program.index(source)
    last = source.tree.body[-1]
    assert isinstance(last, ast.Assign)
    return {value for value in program.values(last.value) if isinstance(value, Rank | RankTest)}


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("rank == 0", MAIN),
        ("0 == rank", MAIN),
        ("rank != 0", OTHERS),
        ("rank > 0", OTHERS),
        ("rank >= 1", OTHERS),
        ("0 < rank", OTHERS),
        ("rank < 1", MAIN),
        ("rank <= 0", MAIN),
        ("1 > rank", MAIN),
        ("rank in (0, -1)", MAIN),
        ("rank in [-1, 0]", MAIN),
        ("rank not in (-1, 0)", OTHERS),
        ("rank in (0, 1)", SOME),
        ("rank == 3", SOME),
        ("rank == args.source", SOME),
        ("rank < 4", SOME),
        ("rank == dist.get_world_size() - 1", SOME),
        ("os.environ['RANK'] == '0'", MAIN),
        ("os.environ.get('RANK', '0') == '0'", MAIN),
        ("os.environ.get('RANK') in (None, '0')", MAIN),
        ("os.environ.get('RANK', '0') != '0'", OTHERS),
        ("not rank", MAIN),
        ("not (rank != 0)", MAIN),
        ("not not is_it", MAIN),
        ("is_it is True", MAIN),
        ("is_it == False", OTHERS),
        ("is_it is not False", MAIN),
        ("args.rank == 0", MAIN),
        ("args['rank'] == 0", MAIN),
        ("local_rank == 0", RankTest("local", True)),
        ("args.gpu == 0", RankTest("local", True)),
        ("rank % 8 == 0", RankTest("local", True)),
        ("rank // 8 == 0", RankTest("node", True)),
        ("node_rank * 8 + local_rank == 0", MAIN),
        ("is_primary()", MAIN),
        ("is_primary", MAIN),
        ("helpers.is_main_process()", MAIN),
        ("helpers.get_rank() == 0", MAIN),
        ("accelerator.is_main_process", MAIN),
        ("accelerator.is_local_main_process", RankTest("local", True)),
        ("accelerator.process_index == 0", MAIN),
        ("is_rank_zero()", MAIN),
        ("self.is_master_process", MAIN),
        ("on_main_process", MAIN),
        ("trainer.is_world_process_zero()", MAIN),
        ("is_local_master()", RankTest("local", True)),
        ("dist.get_rank(args.group) == 0", RankTest("group", True)),
        ("mesh.get_local_rank('data') == 0", RankTest("group", True)),
        ("args.group.rank() == 0", RankTest("group", True)),
        ("not dist.is_initialized() or rank == 0", MAIN),
        ("not args.distributed or args.rank == 0", MAIN),
        ("dist.get_world_size() == 1 or rank == 0", MAIN),
        ("rank == -1 or rank == 0", MAIN),
        ("dist.is_initialized() and rank == 0", MAIN),
        ("not (dist.is_initialized() and rank != 0)", MAIN),
        ("rank == 0 and args.verbose", RankTest("global", True, is_enough=False)),
        ("not (rank == 0 and args.verbose)", RankTest("global", False, is_needed=False)),
        ("rank == 0 or args.always", RankTest("global", True, is_needed=False)),
        ("not (rank == 0 or args.always)", RankTest("global", False, is_enough=False)),
        ("rank == 0 or rank == 1", SOME),
        ("True if args.single else rank == 0", MAIN),
        ("(rank := dist.get_rank()) == 0", MAIN),
    ],
)
def test_a_condition(expression: str, expected: RankTest) -> None:
    assert values(expression) == {expected}


@pytest.mark.parametrize(
    "expression",
    [
        "rank != -1",
        "rank >= 0",
        "rank < 0",
        "rank > -1",
        "rank is not None",
        "rank < dist.get_world_size()",
        "rank < args.world_size",
        "dist.get_world_size() > 1",
        "dist.is_initialized()",
        "args.epoch == 0",
        "main()",
        "args.main",
        "args.root == 0",
        "frame.distance",
    ],
)
def test_no_condition_on_ranks(expression: str) -> None:
    assert values(expression) == set()


def test_the_rank_of_a_matrix_is_none() -> None:
    text = "def adapt(layer, rank=8):\n    return rank == 0\n\n\ndef start(rank=0):\n    return rank == 0\n"
    source = Source(Path("a.py"), text, ast.parse(text))
    program = Program([source])
    adapt, start = program.index(source).every(ast.FunctionDef)
    assert not any(isinstance(value, RankTest) for value in returned(program, adapt))
    assert returned(program, start) == {MAIN}
