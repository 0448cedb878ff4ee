"""On which ranks a place is reached: the call of `here()` in each of these."""

from __future__ import annotations

import ast
from pathlib import Path
from textwrap import dedent

import pytest

from drumline_lint.flow.guards import guards, is_main_only, is_on_every_rank, is_single_process
from drumline_lint.program.program import Program
from drumline_lint.program.value import RankTest
from drumline_lint.reading.source import Source

BEFORE = "import torch.distributed as dist\ndist.init_process_group()\nrank = dist.get_rank()\n"
MAIN = RankTest("global", True)
OTHERS = RankTest("global", False)
SOME = RankTest("global", None)


def place(*texts: str) -> tuple[Program, ast.Call]:
    """The one call of `here()` in some files: a.py, b.py and so on."""
    whole = [BEFORE + dedent(text) for text in texts]
    sources = [
        Source(Path(f"{'abc'[n]}.py"), text, ast.parse(text)) for n, text in enumerate(whole)
    ]
    program = Program(sources)
    (call,) = [call for one in sources for call in program.index(one).calls.get("here", ())]
    return program, call


MAIN_ONLY = {
    "exit in a with": "def main():\n    with x:\n        if rank:\n            return\n    here()\nmain()",
    "exit if distributed": """
        def main():
            if dist.is_initialized():
                if dist.get_rank() != 0:
                    return
            here()
        main()
    """,
    "if": "if rank == 0:\n    here()",
    "else": "if rank != 0:\n    pass\nelse:\n    here()",
    "elif": "if rank > 0:\n    pass\nelif later:\n    here()",
    "and": "if rank == 0 and epoch % 5 == 0:\n    here()",
    "and of attributes": "if args.rank == 0 and epoch > 3:\n    here()",
    "short and": "rank == 0 and here()",
    "short or": "rank != 0 or here()",
    "ternary": "x = here() if rank == 0 else None",
    "other side of a ternary": "x = None if rank else here()",
    "while": "while rank == 0:\n    here()",
    "comprehension": "x = [here() for one in many if rank == 0]",
    "lambda": "if rank == 0:\n    register(lambda: here())",
    "loop": "for x in y:\n    if rank != 0:\n        continue\n    here()",
    "with": "with x:\n    if rank:\n        raise SystemExit\n    here()",
    "exit in else": "def main():\n    if rank == 0:\n        pass\n    else:\n        return\n    here()\nmain()",
    "exit by both branches": """
        def main():
            if rank != 0:
                if late:
                    return
                else:
                    sys.exit(0)
            here()
        import sys
        main()
    """,
    "both tests": "if local_rank == 0:\n    if node_rank == 0:\n        here()",
    "both tests in one": "if local_rank == 0 and node_rank == 0:\n    here()",
    "the callers": "def f():\n    here()\nif rank == 0:\n    f()\nrank == 0 and f()",
    "the callers of callers": "def f():\n    here()\ndef g():\n    f()\nif not rank:\n    g()",
    "one test here, one there": "def f():\n    if node_rank == 0:\n        here()\nif local_rank == 0:\n    f()",
    "a decorator's name": "@rank_zero_only\ndef f():\n    here()\nf()",
    "a decorator that is called": "@helpers.on_main_process(quiet=True)\ndef f():\n    here()\nf()",
    "a decorator of one's own": """
        def sometimes(function):
            def inner(*args):
                if dist.get_rank() == 0:
                    return function(*args)
            return inner
        @sometimes
        def f():
            here()
        f()
    """,
    "property": """
        class T:
            @property
            def first(self):
                return self.r == 0
            def __init__(self):
                self.r = dist.get_rank()
            def save(self):
                if self.first:
                    here()
        T().save()
    """,
}


@pytest.mark.parametrize("name", MAIN_ONLY)
def test_one_process_alone(name: str) -> None:
    program, call = place(MAIN_ONLY[name])
    assert is_main_only(guards(program, call))
    assert not is_on_every_rank(program, call)


EVERYONE = {
    "plain": "here()",
    "other condition": "if epoch % 5 == 0:\n    here()",
    "whether there are ranks": "if dist.is_initialized():\n    here()",
    "the test itself": "if rank == 0 and x:\n    pass\nhere()",
    "in the test": "if here() and rank == 0:\n    pass",
    "after the block": "if rank == 0:\n    x()\nhere()",
    "after a loop that was left": "for x in y:\n    if rank == 0:\n        break\nhere()",
    "finally": "def main():\n    try:\n        if rank:\n            return\n    finally:\n        here()\nmain()",
    "both branches leave": """
        def main():
            for x in y:
                if rank == 0:
                    continue
                else:
                    continue
            here()
        main()
    """,
    "one caller with, one without": "def f():\n    here()\nif rank == 0:\n    f()\nf()",
    "a decorator that is for all": "@main_process_first\ndef f():\n    here()\nf()",
    "a decorator of one's own": """
        def timed_on_main(function):
            def inner(*args):
                try:
                    return function(*args)
                finally:
                    if dist.get_rank() == 0:
                        print("done")
            return inner
        @timed_on_main
        def f():
            here()
        f()
    """,
    "started in its own process": """
        import torch.multiprocessing as mp
        def work(rank):
            dist.barrier()
            here()
        if __name__ == "__main__":
            if one_only:
                work(0)
            else:
                mp.spawn(work, nprocs=2)
    """,
    "another kind of process": """
        from multiprocessing import Process
        def serve():
            pass
        Process(target=serve).start()
        here()
    """,
    "nobody calls it, but it joins": "def go(model):\n    dist.barrier()\n    here()",
}


@pytest.mark.parametrize("name", EVERYONE)
def test_every_rank(name: str) -> None:
    program, call = place(EVERYONE[name])
    assert is_on_every_rank(program, call)
    assert not guards(program, call)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("if local_rank == 0:\n    here()", {RankTest("local", True)}),
        ("if node_rank == 0:\n    here()", {RankTest("node", True)}),
        ("if rank:\n    here()", {OTHERS}),
        ("if rank == 0:\n    pass\nelse:\n    here()", {OTHERS}),
        ("if rank in (0, 1):\n    here()", {SOME}),
        ("if rank == 0 or always:\n    here()", {RankTest("global", True, is_needed=False)}),
        (
            "if rank == 0 and log:\n    pass\nelse:\n    here()",
            {RankTest("global", False, is_needed=False)},
        ),
        ("with main_process_first():\n    here()", {RankTest("global", True, is_needed=False)}),
        ("@local_main_process_only\ndef f():\n    here()\nf()", {RankTest("local", True)}),
    ],
)
def test_some_ranks(text: str, expected: set[RankTest]) -> None:
    program, call = place(text)
    assert guards(program, call) == expected
    assert not is_on_every_rank(program, call)


NET = """
import torch
from torch.nn.parallel import DistributedDataParallel as DDP
class Block(torch.nn.Module):
    def forward(self, x):
        here()
class Net(torch.nn.Module):
    def __init__(self):
        self.first = Block()
    def forward(self, x):
        return self.first(x)
class Task:
    def __call__(self):
        pass
"""


@pytest.mark.parametrize(
    "text",
    [
        "model = Net()",
        "model = Net()\nif rank == 0:\n    model(x)",
        "model = Task()\nmodel(x)",
        "net = Net()\nmodel = torch.nn.Linear(2, 2)\nmodel(x)",
        "model = DDP(torch.nn.Sequential(Task()))\nmodel(x)",
    ],
)
def test_of_who_else_calls_a_model_nothing_is_known(text: str) -> None:
    """It may be a part of another, or called by a library: that some ranks come there only is never
    said."""
    program, call = place(NET + text)
    assert not is_on_every_rank(program, call)
    assert not guards(program, call)


def test_nobody_knows_who_calls_it() -> None:
    program, call = place("def helper(x):\n    here()")
    assert not is_on_every_rank(program, call)
    assert not is_on_every_rank(program, call)


def test_a_script_that_never_comes_to_anything_distributed() -> None:
    text = "def main():\n    print_help()\n    here()\nmain()\n"
    source = Source(Path("a.py"), text, ast.parse(text))
    program = Program([source])
    (call,) = program.index(source).calls["here"]
    assert not is_on_every_rank(program, call)


def test_functions_that_call_each_other() -> None:
    text = """
        def even(n):
            odd(n - 1)
        def odd(n):
            here()
            even(n - 1)
        if rank == 0:
            even(4)
    """
    program, call = place(text)
    assert not is_on_every_rank(program, call)


def test_helpers_in_another_file() -> None:
    text = "from b import first\nif first():\n    here()"
    helper = "def first():\n    if not dist.is_available():\n        return True\n    return dist.get_rank() == 0"
    program, call = place(text, helper)
    assert guards(program, call) == {MAIN}


def test_a_caller_in_another_file() -> None:
    program, call = place("def save():\n    here()", "import a\nif rank == 0:\n    a.save()")
    assert is_main_only(guards(program, call))


def test_many_ways_end_soon() -> None:
    levels = [f"def f{n}():\n" + f"    f{n + 1}()\n" * 6 for n in range(12)]
    program, call = place("".join(levels) + "def f12():\n    here()\nf0()")
    assert is_on_every_rank(program, call)


FOR_ONE = {
    "the key of a dict": "if opt['dist']:\n    dist.barrier()\nelse:\n    here()",
    "asked with get": "if not opt.get('distributed', False):\n    here()",
    "no launcher": "if args.launcher == 'none':\n    here()",
    "an attribute": "if args.distributed:\n    dist.barrier()\nelse:\n    here()",
    "a flag that is enabled": "if self.ddp_enabled:\n    dist.barrier()\nelse:\n    here()",
    "both must hold": "if dist.is_available() and dist.is_initialized():\n    pass\nelse:\n    here()",
    "one of both": "if not args.distributed and args.test:\n    here()",
    "early exit": "def f():\n    if args.distributed:\n        return\n    here()\nf()",
}


@pytest.mark.parametrize("name", FOR_ONE)
def test_a_branch_for_one_process_is_of_no_rank(name: str) -> None:
    program, call = place(FOR_ONE[name])
    assert is_single_process(program, call)
    assert not is_on_every_rank(program, call)


FOR_ALL = {
    "the branch of several": "if opt['dist']:\n    here()",
    "another key": "if opt['val']:\n    dist.barrier()\nelse:\n    here()",
    "one of two ways to be distributed": "if args.launcher == 'slurm':\n    pass\nelse:\n    here()",
    "behind it": "if not dist.is_initialized():\n    dist.init_process_group()\nelse:\n    here()",
    "both begin it": "if slurm:\n    dist.init_process_group('a')\n    here()\nelse:\n    dist.init_process_group()",
}


@pytest.mark.parametrize("name", FOR_ALL)
def test_every_rank_comes_to_other_branches(name: str) -> None:
    program, call = place(FOR_ALL[name])
    assert is_on_every_rank(program, call)
