"""Which code nobody comes to: the call of `here()` in each of these."""

from __future__ import annotations

import ast
from pathlib import Path
from textwrap import dedent

import pytest

from drumline_lint.flow.dead_code import always, is_dead
from drumline_lint.flow.guards import is_on_every_rank
from drumline_lint.program.program import Program
from drumline_lint.program.tree import statement_at
from drumline_lint.reading.source import Source

BEFORE = "import torch.distributed as dist\ndist.init_process_group()\n"


def _place(*texts: str, before: str = BEFORE) -> tuple[Program, ast.Call]:
    """The first is distributed; the others are b.py and c.py."""
    whole = [before + dedent(texts[0]), *map(dedent, texts[1:])]
    sources = [
        Source(Path(f"{'abc'[n]}.py"), text, ast.parse(text)) for n, text in enumerate(whole)
    ]
    program = Program(sources)
    (call,) = [call for one in sources for call in program.index(one).calls.get("here", ())]
    return program, call


SWITCH = "def f(x, show=False):\n    if show:\n        here()\n"
CLASS = """
class Loss:
    def __init__(self, model, balance=False):
        self.gain, self.balance = 1.0, balance
    def __call__(self, x):
        if self.balance:
            here()
"""
DEAD = {
    "False and something": "if False and x:\n    here()",
    "the other side of True": "if True or x:\n    pass\nelse:\n    here()",
    "after an exit": "def f():\n    if not False:\n        return\n    here()\nf()",
    "a switch that nobody turns on": SWITCH + "f(1)\nf(2, False)\nf(3, show=None)",
    "not the other way": SWITCH.replace("if show", "if not show").replace("=False", "=True")
    + "f(1)",
    "given on": SWITCH + "def g(show=False):\n    f(1, show=show)\ng()",
    "under another name": SWITCH + "def h(x):\n    pass\ng = f if quick else h\ng(1)",
    "what is called there": "def g():\n    here()\ndef f(show=False):\n    if show:\n        g()\nf()",
    "an attribute": CLASS + "loss = Loss(1)\nloss(2)",
    "a method": "class A:\n    def f(self, show=False):\n        if show:\n            here()\nA().f()",
}


@pytest.mark.parametrize("name", DEAD)
def test_no_rank_comes_there(name: str) -> None:
    program, call = _place(DEAD[name])
    assert is_dead(program, call)
    assert not is_on_every_rank(program, call)


ALIVE = {
    "turned on once": SWITCH + "f(1)\nf(2, show=True)",
    "by position": SWITCH + "f(1, True)",
    "by what is not known": SWITCH + "f(1, show=args.show)",
    "by many arguments": SWITCH + "f(1, **options)",
    "nobody calls it": SWITCH,
    "handed on": SWITCH + "f(1)\nuse(f)",
    "by a name that is handed on": SWITCH + "f(1)\ng = f\nuse(g)",
    "as a command": "@click.command()\n" + SWITCH + "f()",
    "by a method of something not known": """
        class A:
            def f(self, show=False):
                if show:
                    here()
        A().f()
        def g(a):
            a.f(show=True)
    """,
    "set in the function": SWITCH.replace("    if", "    show = show or look()\n    if") + "f(1)",
    "a switch of the file": "SHOW = False\nif SHOW:\n    here()",
    "the other side": SWITCH.replace("if show", "if not show") + "f(1)",
    "an attribute that is turned on": CLASS + "loss = Loss(1)\nloss.balance = True",
    "an attribute by a subclass": CLASS + "class Other(Loss):\n    pass\nOther(1, True)\nLoss(1)",
    "an attribute by its name": CLASS + "loss = Loss(1)\nsetattr(loss, name, x)",
    "an attribute by a name that is known": CLASS
    + "def f(a):\n    setattr(a, 'balance', 1)\nLoss(1)",
    "an attribute of itself": CLASS + "    def f(self, x):\n        setattr(self, x, 1)\nLoss(1)",
    "all attributes": CLASS + "loss = Loss(1)\nvars(loss).update(options)",
    "one in its dictionary": CLASS + "loss = Loss(1)\nloss.__dict__[name] = 1",
    "another dictionary": CLASS + "loss = Loss(1)\nloss.__dict__ = options",
    "an attribute of a class that is made so": CLASS + "Loss(1, balance=True)",
}


@pytest.mark.parametrize("name", ALIVE)
def test_somebody_may_come_there(name: str) -> None:
    program, call = _place(ALIVE[name])
    assert not is_dead(program, call)


def test_attributes_are_set_by_name_in_another_file() -> None:
    program, call = _place(
        f"{CLASS}loss = Loss(1)\nloss(2)\nimport b",
        "def fill(a, options):\n    vars(a).update(options)",
    )
    assert is_dead(program, call)


def test_only_callers_that_are_distributed_count() -> None:
    turned_on = "from b import f\nf(1, show=True)\n"
    program, call = _place("from b import f\nf(1)", SWITCH, turned_on)
    assert is_dead(program, call)
    program, call = _place("from b import f\nf(1)\nimport c", SWITCH, turned_on)
    assert not is_dead(program, call)


def test_a_caller_may_have_imported_it_under_another_name() -> None:
    uses = "from b import f, f as end\nf(1)\nend(1{})"
    assert is_dead(*_place(uses.format(""), SWITCH))
    assert not is_dead(*_place(uses.format(", True"), SWITCH))
    again = "from b import f\nimport c\nf(1)"
    assert not is_dead(*_place(again, SWITCH, "from b import f as end\nend(1, True)"))


def test_a_long_way_down_is_not_gone() -> None:
    chain = "".join(f"def f{n}(show=False):\n    f{n + 1}(show=show)\n" for n in range(400))
    program, call = _place(f"{chain}def f400(show=False):\n    if show:\n        here()\nf0()")
    assert is_dead(program, call) in (True, False)


def test_whoever_asks_first_does_not_decide() -> None:
    chain = "".join(f"def f{n}(show=False):\n    f{n + 1}(show=show)\n" for n in range(30))
    program, call = _place(f"{chain}def f30(show=False):\n    if show:\n        here()\nf0()")
    names = [one.value for one in program.index(program.sources[0]).every(ast.keyword)]
    assert not is_dead(program, call)
    assert always(program, names[15]) is False


def test_the_statement_of_a_line() -> None:
    text = "try:\n    pass\nexcept E:\n    if (a and\n        b):\n        c()\nmatch x:\n    case 1:\n        d()\n"
    tree = ast.parse(text)
    found = {line: type(statement_at(tree, line)).__name__ for line in range(1, 11)}
    assert found == {
        1: "Try", 2: "Pass", 3: "Try", 4: "If", 5: "If", 6: "Expr", 7: "Match", 8: "Match", 9: "Expr", 10: "NoneType",
    }  # fmt: skip
