"""What the program knows of where expressions come from, of code for one process, and of
loaders."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from drumline_lint.flow.single_process import is_single_process
from drumline_lint.program.imports import connected
from drumline_lint.program.origins import depends_on_rank, written_values
from drumline_lint.program.program import Program
from drumline_lint.program.value import ConstantValue
from drumline_lint.reading.source import Source
from drumline_lint.training.loaders import loaders, loaders_behind


def _program(text: str) -> tuple[Program, Source]:
    source = Source(Path("a.py"), text, ast.parse(text))
    program = Program([source])
    program.index(source)
    return program, source


def _argument(program: Program, source: Source) -> ast.expr:
    """Of the call of `use` in the text."""
    (call,) = program.index(source).calls["use"]
    return call.args[0]


def _written(text: str) -> set[str]:
    program, source = _program(text)
    return {ast.unparse(one) for one in written_values(program, _argument(program, source))}


def test_a_parameter_is_also_its_default_where_one_call_leaves_it_out() -> None:
    text = "def f(a=False):\n    use(a)\nf(True)\nf()\n"
    program, source = _program(text)
    assert program.values(_argument(program, source)) == {ConstantValue(True), ConstantValue(False)}
    assert _written(text) == {"True", "False"}


def test_a_parameter_that_every_call_gives_is_never_its_default() -> None:
    program, source = _program("def f(a=False):\n    use(a)\nf(True)\nf(a=True)\n")
    assert program.values(_argument(program, source)) == {ConstantValue(True)}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a = g(1) if x else h(2)\nuse(a)", {"g(1)", "h(2)"}),
        ("a, b = g(1), h(2)\nuse(b)", {"h(2)"}),
        (
            "class C:\n    def __init__(self, p):\n        self.p = p\n        use(self.p)\nC(g(3))",
            {"g(3)"},
        ),
        ("args.p = g(1)\nuse(args.p)", {"g(1)"}),
        ("use(unseen)", {"unseen"}),
        ("def f(a, *, b=4):\n    use(b)\nf(1)", {"4"}),
        ("def f(a, b=4):\n    use(b)", {"b"}),
        ("def f(a, b=4):\n    use(b)\nf(1, 2)\nf(*more)", {"2", "b"}),
        ("a = b\nb = a\nuse(a)", set()),
    ],
)
def test_what_is_written_behind_a_name(text: str, expected: set[str]) -> None:
    assert _written(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "use(files[rank::4])",
        "part = files[:n // world_size]\nuse(Data(part))",
        "import torch.distributed as dist\nclass D:\n    def __iter__(self):\n        yield dist.get_rank()\nuse(D())",
        "def make():\n    return Data(int(os.environ['WORLD_SIZE']))\nuse(make())",
    ],
)
def test_a_rank_is_found_in_what_something_is_made_of(text: str) -> None:
    program, source = _program(text)
    assert depends_on_rank(program, _argument(program, source))


def test_no_rank_is_found_where_there_is_none() -> None:
    program, source = _program("rank = 3\nclass D:\n    pass\nuse(D(files[1:]))")
    assert not depends_on_rank(program, _argument(program, source))


@pytest.mark.parametrize(
    "test",
    [
        "not args.distributed",
        "world_size == 1",
        "int(os.environ['WORLD_SIZE']) <= 1",
        "local_rank == -1",
        "'RANK' not in os.environ",
        "not (dist.is_available() and dist.is_initialized())",
        "rank is None",
    ],
)
def test_code_for_one_process(test: str) -> None:
    for text in (
        f"if {test}:\n    use(1)",
        f"def f():\n    use(1)\nif {test}:\n    f()",
        f"flag = {test}\nif flag:\n    use(1)",
    ):
        program, source = _program(text)
        assert is_single_process(program, program.index(source).calls["use"][0]), text
        program, source = _program(
            text.replace("if flag", "if not flag").replace(f"if {test}", f"if not ({test})")
        )
        assert not is_single_process(program, program.index(source).calls["use"][0]), text


def test_the_branch_beside_the_distributed_one_is_for_one_process() -> None:
    program, source = _program(
        "from torch.nn.parallel import DistributedDataParallel as DDP\n"
        "if how == 'many':\n    model = DDP(model)\nelse:\n    use(1)\n"
    )
    assert is_single_process(program, program.index(source).calls["use"][0])


def test_loaders_are_seen_through_what_is_put_around_them() -> None:
    program, source = _program(
        "from torch.utils.data import DataLoader\nfrom tqdm import tqdm\n"
        "loader = DataLoader(data)\nbar = tqdm(enumerate(loader))\nuse(bar)\n"
    )
    assert loaders(program, _argument(program, source)) == program.index(source).calls["DataLoader"]


def test_what_a_batch_is_a_part_of() -> None:
    program, source = _program(
        "from torch.utils.data import DataLoader\nloader = DataLoader(data)\n"
        "def move(batch):\n    return {key: use(value) for key, value in batch.items()}\n"
        "for number, batch in enumerate(loader):\n    move(batch)\n"
    )
    assert (
        loaders_behind(program, _argument(program, source))
        == program.index(source).calls["DataLoader"]
    )


def test_files_that_run_together_are_those_that_imports_connect() -> None:
    texts = {
        "main.py": "import data\n",
        "data.py": "import helpers\n",
        "helpers.py": "",
        "other.py": "import os\n",
    }
    program = Program([Source(Path(name), text, ast.parse(text)) for name, text in texts.items()])
    found = {
        str(one.path): {str(other.path) for other in connected(program, one)}
        for one in program.sources
    }
    together = {"main.py", "data.py", "helpers.py"}
    assert found == {"other.py": {"other.py"}} | dict.fromkeys(together, together)
