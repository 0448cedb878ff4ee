"""Which loops train, which evaluate, and what they do at every step."""

from __future__ import annotations

import ast
import textwrap
from pathlib import Path

from drumline_lint.flow.loops import batch_loops, evaluation_loops, outer_loops
from drumline_lint.program.program import Program
from drumline_lint.reading.source import Source


def read(text: str) -> tuple[Program, Source]:
    text = textwrap.dedent(text)
    source = Source(Path("a.py"), text, ast.parse(text))
    program = Program([source])
    program.index(source)
    return program, source


def batches(text: str) -> list[str]:
    """The first lines of the loops that train."""
    program, source = read(text)
    return [source.lines[loop.lineno - 1].strip() for loop in batch_loops(program, source)]


def evaluations(text: str) -> list[str]:
    program, source = read(text)
    return [source.lines[loop.lineno - 1].strip() for loop in evaluation_loops(program, source)]


def test_the_inmost_of_epochs_and_batches() -> None:
    assert batches("for e in range(9):\n    for b in loader:\n        f(b).backward()") == [
        "for b in loader:"
    ]


def test_an_epoch_whose_batches_are_in_a_function_is_no_batch_loop() -> None:
    text = """
    class Trainer:
        def step(self, b):
            self.loss(b).backward()

        def run_epoch(self):
            for b in self.loader:
                self.step(b)

        def fit(self):
            for e in range(3):
                self.run_epoch()
    """
    assert batches(text) == ["for b in self.loader:"]


def test_a_while_loop_and_its_helper() -> None:
    text = """
    def train_step(b):
        scaler.scale(f(b)).backward()

    while step < 100:
        train_step(next(batches))
        step += 1
    """
    assert batches(text) == ["while step < 100:"]


def test_what_a_loop_iterates_over_and_its_else_are_done_once() -> None:
    assert batches("for e in train(f().backward()):\n    pass\nelse:\n    g().backward()") == []
    assert batches("while f().backward():\n    pass") == ["while f().backward():"]


def test_functions_that_call_each_other() -> None:
    text = """
    def f(n):
        g(n)

    def g(n):
        f(n)
        n.backward()

    for b in loader:
        f(b)
    """
    assert batches(text) == ["for b in loader:"]


def test_outer_loops_in_callers_inmost_first() -> None:
    text = """
    def run():
        for b in loader:
            b.backward()

    while True:
        for e in range(3):
            run()
    """
    program, source = read(text)
    (loop,) = batch_loops(program, source)
    assert [type(one).__name__ for one in outer_loops(program, loop)] == ["For", "While"]


def test_evaluation_by_with_decorator_and_mode() -> None:
    text = """
    import torch
    from torch import inference_mode

    with torch.no_grad():
        for a in loader:
            f(a)

    @inference_mode()
    def g():
        for b in loader:
            f(b)

    def h():
        model.eval()
        for c in loader:
            f(c)

    for d in loader:
        with torch.set_grad_enabled(False):
            f(d)
    """
    assert evaluations(text) == [f"for {name} in loader:" for name in "abcd"]


def test_evaluation_chosen_by_the_caller() -> None:
    text = """
    import torch

    def run():
        for a in loader:
            f(a)

    with torch.no_grad():
        run()
    """
    assert evaluations(text) == ["for a in loader:"]
    assert evaluations(textwrap.dedent(text) + "\nrun()\n") == []


def test_training_is_not_evaluation() -> None:
    text = """
    import torch

    def epoch():
        model.eval()
        model.train()
        for a in loader:
            f(a)
        model.eval()
        for b in loader:
            f(b)
        for c in loader:
            f(c).backward()
        for p in model.parameters():
            p.clone()
        for n in range(3):
            f(n)
        model.train(False)
        for d in loader:
            f(d)
        model.train()

    with torch.set_grad_enabled(True):
        for e in loader:
            f(e)
    """
    assert evaluations(text) == ["for b in loader:", "for d in loader:"]


def test_a_function_that_is_only_defined_in_the_loop_is_not_run_by_it() -> None:
    text = "for b in loader:\n    def closure():\n        f(b).backward()\n"
    assert batches(text) == []
    assert batches(f"{text}    closure()\n") == ["for b in loader:"]
