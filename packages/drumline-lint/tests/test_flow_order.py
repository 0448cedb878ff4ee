"""What is done first: through functions, classes, `with`, imports and processes; never without
end."""

from __future__ import annotations

import pytest

from drumline_lint.flow.run_order import Run, process_of, script
from drumline_lint.program.program import Program
from drumline_lint.program.tree import last_name
from test_program_values import program_of


def said(run: Run) -> str:
    """The names of calls to what nobody defines: one letter each."""
    return "".join(name for step in run if (name := last_name(step.call.func)) in set("abcdexz"))


def order(text: str, **others: str) -> str:
    program = program_of({"main": text, **others})
    return said(script(program, program.sources[0]))


def step(program: Program, name: str):  # type: ignore[no-untyped-def]
    return next(
        one for one in script(program, program.sources[0]) if last_name(one.call.func) == name
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a()\nb(c())", "acb"),
        ("def f():\n    b()\na()\nf()\nc()", "abc"),
        ("def f():\n    g()\n    c()\ndef g():\n    b()\na()\nf()", "abc"),
        ("if x:\n    a()\nelse:\n    b()\nc()", "abc"),
        ("def main():\n    a()\nif __name__ == '__main__':\n    main()", "a"),
        ("for x in a():\n    b()\nelse:\n    c()", "abc"),
        ("try:\n    a()\nexcept E:\n    b()\nfinally:\n    c()", "abc"),
        ("x = [b(y) for y in a()]\nc()", "abc"),
        ("f = lambda: a()\nb()\nf()", "ba"),
        ("class A:\n    a()\n    def f(self):\n        c()\nb()\nA().f()", "abc"),
    ],
)
def test_order_within_a_file(text: str, expected: str) -> None:
    assert order(text) == expected


def test_classes_and_their_methods() -> None:
    text = """
    class Base:
        def __init__(self):
            b()
    class Trainer(Base):
        def fit(self):
            d()
            self.step()
        def step(self):
            e()
    a()
    trainer = Trainer()
    c()
    trainer.fit()
    """
    assert order(text) == "abcde"


def test_decorators_and_defaults_are_evaluated_where_the_function_is_defined() -> None:
    assert order("@a()\ndef f(x=b()):\n    d()\nc()\nf()") == "abcd"


def test_what_nobody_calls_is_in_no_run() -> None:
    assert order("a()\ndef f():\n    b()\n    g()\ndef g():\n    c()") == "a"


def test_a_function_that_another_file_calls_is_in_that_files_run() -> None:
    program = program_of(
        {"main": "from other import f\na()\nf()\nc()", "other": "def f():\n    b()"}
    )
    assert [said(script(program, source)) for source in program.sources] == ["abc", ""]


@pytest.mark.parametrize(
    "start",
    [
        "mp.spawn(worker, nprocs=2)",
        "mp.Process(target=worker).start()",
        "ctx.start_processes(worker, (1,))",
    ],
)
def test_what_is_started_in_another_process(start: str) -> None:
    text = f"import torch.multiprocessing as mp\ndef worker(rank):\n    b()\na()\n{start}\nc()"
    assert order(text) == "abc"
    program = program_of({"main": text})
    assert process_of(program, step(program, "a")) == ()
    assert len(process_of(program, step(program, "b"))) == 1


def test_recursion_ends() -> None:
    assert order("def f():\n    a()\n    g()\ndef g():\n    b()\n    f()\nf()\nc()") == "abc"


def test_a_function_called_often_is_looked_into_a_few_times_and_what_follows_is_not_lost() -> None:
    lines = ["def f0():\n    a()"]
    lines += [f"def f{n}():\n" + f"    f{n - 1}()\n" * 10 for n in range(1, 9)]
    assert order("\n".join([*lines, "f8()", "z()"])) == "aaz"


def test_a_deep_expression_does_not_exhaust_the_stack() -> None:
    assert order("x = " + " + ".join(["1"] * 900) + "\na()") == "a"


def test_a_generator_used_by_with_surrounds_the_body() -> None:
    text = """
    @contextmanager
    def group():
        a()
        try:
            yield
        finally:
            d()
    with open(x), group():
        b()
        c()
    e()
    """
    assert order(text) == "abcde"


def test_a_class_used_by_with_surrounds_the_body() -> None:
    text = """
    class Group:
        def __enter__(self):
            a()
        def __exit__(self, *error):
            c()
    with Group() as group:
        b()
    d()
    """
    assert order(text) == "abcd"


def test_an_import_runs_a_file_once_and_without_what_is_for_the_script() -> None:
    assert (
        order(
            "a()\nimport other\nimport other\nc()",
            other="b()\nimport main\nif __name__ == '__main__':\n    x()",
        )
        == "abc"
    )


def test_an_import_of_a_module_runs_its_package_first() -> None:
    program = program_of(
        {"main": "from pkg.inner import x\nc()", "pkg/__init__": "a()", "pkg/inner": "b()"}
    )
    assert said(script(program, program.sources[0])) == "abc"


def test_the_run_of_a_file_that_only_defines_is_empty() -> None:
    program = program_of({"main": "import os\ndef f():\n    a()"})
    assert script(program, program.sources[0]) == []


def test_the_body_of_a_with_is_done_once_where_its_manager_yields_in_two_places() -> None:
    manager = "@contextmanager\ndef group():\n    if x:\n        yield\n    else:\n        yield\n    c()\n"
    assert order("a()\n" + manager + "with group():\n    b()") == "abc"
