"""What names mean: through assignments, functions, classes, files; and that asking never goes
astray."""

from __future__ import annotations

import ast
from pathlib import Path
from textwrap import dedent

import pytest

from drumline_lint.program import names
from drumline_lint.program.program import Program
from drumline_lint.program.value import (
    CallResult,
    ConstantValue,
    Instance,
    Library,
    LoopItem,
    Rank,
    RankTest,
    Values,
)
from drumline_lint.reading.source import Source


def program_of(files: dict[str, str]) -> Program:
    """By their path, without the ending."""
    texts = {f"{name}.py": dedent(text) for name, text in files.items()}
    return Program([Source(Path(name), text, ast.parse(text)) for name, text in texts.items()])


def asked(program: Program, number: int = 0) -> Values:
    """What is given to `ask(...)` in the first file."""
    calls = program.index(program.sources[number]).calls["ask"]
    assert len(calls) == 1
    return program.values(calls[0].args[0])


def values_in(text: str) -> Values:
    return asked(program_of({"main": text}))


def names_in(text: str) -> set[str]:
    """Of what a library made, without which call."""
    return {value.name for value in values_in(text) if isinstance(value, CallResult | Library)}


@pytest.mark.parametrize(
    "text",
    [
        "import torch; ask(torch.nn.parallel.DistributedDataParallel)",
        "import torch.nn as nn; ask(nn.parallel.DistributedDataParallel)",
        "from torch.nn import parallel as p; ask(p.DistributedDataParallel)",
        "from torch.nn.parallel import DistributedDataParallel as DDP; ask(DDP)",
        "from torch.nn.parallel.distributed import DistributedDataParallel as DDP; ask(DDP)",
        "import torch.nn.parallel; wrap = torch.nn.parallel.DistributedDataParallel; ask(wrap)",
        "from torch.nn.parallel import *; ask(DistributedDataParallel)",
        "def f():\n    from torch.nn.parallel import DistributedDataParallel as D\n    ask(D)",
        "try:\n    from torch.nn.parallel import DistributedDataParallel as D\nexcept Exception:\n    D = 0\nask(D)",
    ],
)
def test_a_thing_has_one_name(text: str) -> None:
    assert Library(names.DDP) in values_in(text)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("from torch.nn.parallel import DistributedDataParallel as D; m = D(x); ask(m)", names.DDP),
        (
            "from torch.nn.parallel import DistributedDataParallel as D; m = D(x).to(0).train(); ask(m)",
            names.DDP,
        ),
        ("import torch; m = torch.compile(torch.nn.Linear(1, 1)); ask(m)", "torch.nn.Linear"),
        ("import torch; (a, b) = torch.nn.Linear(1, 1), 2; ask(a)", "torch.nn.Linear"),
        ("import torch; ask(a := torch.nn.Linear(1, 1))", "torch.nn.Linear"),
        ("import torch\ndef f():\n    return torch.nn.Linear(1, 1)\nask(f())", "torch.nn.Linear"),
        ("import torch\ndef f(m):\n    ask(m)\nf(torch.nn.Linear(1, 1))", "torch.nn.Linear"),
        ("import torch\ndef f(*, m=torch.nn.Linear(1, 1)):\n    ask(m)", "torch.nn.Linear"),
        ("import torch\nf = lambda: torch.nn.Linear(1, 1)\nask(f())", "torch.nn.Linear"),
        ("import torch\nwith torch.no_grad() as g:\n    ask(g)", "torch.no_grad"),
        ("import torch\nfor m in [torch.nn.Linear(1, 1)]:\n    ask(m)", "torch.nn.Linear"),
        ("import torch\no = torch.optim.SGD(p)\nask(o.state_dict())", "torch.optim.SGD.state_dict"),
        (
            "import torch\nargs.model = torch.nn.Linear(1, 1)\ndef f(args):\n    ask(args.model)",
            "torch.nn.Linear",
        ),
    ],
)
def test_what_was_made_is_followed(text: str, name: str) -> None:
    assert name in names_in(text)


def test_the_last_assignment_counts() -> None:
    text = "import torch\nfrom torch.nn.parallel import DistributedDataParallel as D\n"
    text += "m = torch.nn.Linear(1, 1)\n{before}m = D(m)\n{after}"
    assert names_in(text.format(before="ask(m)\n", after="")) == {"torch.nn.Linear"}
    assert names_in(text.format(before="", after="ask(m)\n")) == {names.DDP}
    assert names_in(text.format(before="", after="ask(m.module)\n")) == {"torch.nn.Linear"}


def test_a_class_has_what_its_methods_assign() -> None:
    program = program_of(
        {
            "main": """
        import torch
        from torch.nn.parallel import DistributedDataParallel as DDP
        class Base:
            def wrap(self, model):
                self.model = DDP(model)
        class Trainer(Base):
            def __init__(self, rank):
                self._rank = rank
            @property
            def is_first(self):
                return self._rank == 0
        def main():
            trainer = Trainer(torch.distributed.get_rank())
            ask((trainer.model, trainer.is_first))
        """
        }
    )
    (pair,) = asked(program)
    model, is_first = pair.items
    assert [value.name for value in program.values(model)] == [names.DDP]
    assert program.values(is_first) == {RankTest("global", True)}


def test_files_see_each_other() -> None:
    program = program_of(
        {
            "train": "from lib import setup\nfrom lib.ranks import *\nimport lib.ranks\n"
            "ask((setup(), mine(), lib.ranks.mine()))",
            "lib/__init__": "from .start import setup",
            "lib/start": "from . import ranks\ndef setup():\n    return ranks.mine()",
            "lib/ranks": "import os\ndef mine():\n    return int(os.environ['LOCAL_RANK'])",
            "other/ranks": "def mine():\n    return 7",
        }
    )
    (three,) = asked(program)
    for one in three.items:
        assert program.values(one) == {Rank("local")}


def test_of_two_files_with_a_name_the_nearer_one_is_meant() -> None:
    program = program_of(
        {
            "a/train": "from helpers import what\nask(what())",
            "a/helpers": "def what():\n    return 1",
            "b/helpers": "def what():\n    return 2",
        }
    )
    assert asked(program) == {ConstantValue(1)}


def test_who_calls_a_function() -> None:
    program = program_of(
        {
            "main": """
        import torch.multiprocessing as mp
        class Net:
            def __init__(self, size): ...
            def fit(self): ...
        def worker(rank, size):
            Net(size).fit()
            ask((rank, size))
        if __name__ == "__main__":
            mp.spawn(worker, args=(8,), nprocs=8)
        """
        }
    )
    source = program.sources[0]
    by_name = {function.name: function for function in program.index(source).every(ast.FunctionDef)}
    written = {
        name: [source.code(call) for call in program.callers(by_name[name])] for name in by_name
    }
    assert written == {
        "__init__": ["Net(size)"],
        "fit": ["Net(size).fit()"],
        "worker": ["mp.spawn(worker, args=(8,), nprocs=8)"],
    }
    (pair,) = asked(program)
    assert [program.values(one) for one in pair.items] == [{Rank("spawned")}, {ConstantValue(8)}]


@pytest.mark.parametrize(
    "text",
    [
        "x = x\nask(x)",
        "def f():\n    return f()\nask(f())",
        "def f(a):\n    return g(a)\ndef g(b):\n    return f(b)\nask(f(1))",
        "class A(A):\n    pass\nask(A().x)",
        "class A(B): ...\nclass B(A): ...\nask(A().x.y())",
        "for x in x:\n    x = x.x\n    ask(x)",
        "from . import *\nask(nothing)",
        "from main import a as b\na = b\nask(a)",
        "import a.b.c\nask(a.b.c.d())",
        "def f(*args, **kwargs):\n    ask(f(*args, **kwargs))\nf(*f())",
        "ask(" + "+".join(["rank"] * 900) + ")",
        "x0 = 0\n" + "".join(f"x{n + 1} = x{n}\n" for n in range(500)) + "ask(x500)",
        "x = a" + ".b" * 900 + "\nask(x)",
        "x = a" + "()" * 900 + "\nask(x)",
    ],
)
def test_asking_ends(text: str) -> None:
    assert isinstance(values_in(text), frozenset)


def test_what_is_found_does_not_depend_on_who_asks_first() -> None:
    text = """
    import torch.distributed as dist
    def rank(depth=0):
        if depth > 3:
            return dist.get_rank()
        return other(depth + 1)
    def other(depth):
        return rank(depth)
    ask((rank(), other(1)))
    """
    for first in (0, 1):
        program = program_of({"main": text})
        (pair,) = asked(program)
        order = pair.items if first == 0 else reversed(pair.items)
        assert [Rank("global") in program.values(one) for one in order] == [True, True]


@pytest.mark.parametrize(
    "text",
    [
        "for state.batch in enumerate(loader):\n    ask(state.batch)",
        "for number, state.batch in enumerate(loader):\n    ask(state.batch)",
        "state.batch = None\ndef f(state):\n    for state.batch in loader:\n        ask(state.batch)",
        "class T:\n    def f(self):\n        for self.batch in loader:\n            self.g()\n"
        "    def g(self):\n        ask(self.batch)",
    ],
)
def test_an_attribute_may_be_the_target_of_a_loop(text: str) -> None:
    over = {ast.unparse(value.of) for value in values_in(text) if isinstance(value, LoopItem)}
    assert over == {"loader"}


def test_an_attribute_that_counts_is_no_rank() -> None:
    text = "def f(x):\n    for x.rank in range(4):\n        ask(x.rank)"
    assert not any(isinstance(value, Rank) for value in values_in(text))


def test_an_attribute_may_be_what_a_with_enters() -> None:
    text = "import x\ndef f(state):\n    with x.group() as state.group:\n        ask(state.group)"
    assert names_in(text) == {"x.group"}


def test_an_instance_of_a_model_is_known_for_one() -> None:
    program = program_of(
        {
            "main": "import torch.nn as nn\nclass Base(nn.Module): ...\nclass Net(Base): ...\nask(Net().cuda())"
        }
    )
    (value,) = asked(program)
    assert isinstance(value, Instance)
    assert program.is_module(value.of)


def test_unknown_things_are_not_guessed() -> None:
    assert values_in("ask(something[3].x(4) % 2)") == frozenset()
    assert values_in("def f(a):\n    ask(a)") == frozenset()
    assert values_in("with open(p) as f:\n    ask(f.read())") != {ConstantValue("")}
