"""Code that was cut, shuffled and spliced: every file is read or told, and no rule fails on any."""

from __future__ import annotations

from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from drumline_lint.findings import Severity
from drumline_lint.linter import all_docs, check
from drumline_lint.output.formats import as_json
from drumline_lint.output.text import as_text
from drumline_lint.reading.parse import read_bytes
from drumline_lint.rules import all_rules
from drumline_lint.settings import Settings

RULES = all_rules()
EVERYTHING = Settings(chosen=frozenset(all_docs(RULES)), severity=Severity.NOTE)
PYTHON = [text for module in RULES.values() for text in (module.RULE.bad, module.RULE.good)]
PIECES = [
    "(",
    ")",
    "lambda: ",
    "if rank == 0:\n    ",
    "\\\n",
    "self.",
    " = ",
    "*",
    "'",
    "[0]",
    "await ",
    "\x0c",
    "é",
]
UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def look_at(files: dict[str, str]) -> None:
    """The whole way, to what is printed."""
    readings = [read_bytes(Path(name), text.encode()) for name, text in files.items()]
    report = check(readings, RULES, EVERYTHING)
    assert [said for said in report.problems if said.rule == "DL999"] == []
    as_text(report)
    as_json(report)


snippets = st.sampled_from(PYTHON)


@st.composite
def spliced(draw: st.DrawFn) -> str:
    """Lines of several snippets in another order, some of them indented or gone: much of it can
    still be parsed."""
    lines = [
        line
        for text in draw(st.lists(snippets, min_size=1, max_size=4))
        for line in text.splitlines()
    ]
    kept = draw(st.lists(st.sampled_from(lines), min_size=1, max_size=25))
    return "\n".join(draw(st.sampled_from(["", "", "", "    "])) + line for line in kept) + "\n"


@UNHURRIED
@given(snippets, st.data())
def test_truncated(text: str, data: st.DataObject) -> None:
    look_at({"a.py": text[: data.draw(st.integers(0, len(text)))], "b.sh": text})


@UNHURRIED
@given(snippets, st.sampled_from(PIECES), st.data())
def test_with_something_put_in(text: str, piece: str, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(text)))
    look_at({"a.py": text[:at] + piece + text[at:], "b.sh": text[:at] + piece + text[at:]})


@UNHURRIED
@given(st.lists(snippets, min_size=2, max_size=4))
def test_files_that_name_each_other(texts: list[str]) -> None:
    names = [f"part{number}" for number in range(len(texts))]
    imports = "".join(f"from {name} import *\nimport {name}\n" for name in names)
    look_at({f"{name}.py": imports + text for name, text in zip(names, texts, strict=True)})


@UNHURRIED
@given(spliced(), spliced())
def test_spliced(first: str, second: str) -> None:
    look_at({"a.py": first, "b.py": f"from a import *\n{second}", "c.sh": first})


def test_deep_code_is_reported_and_not_a_mistake_of_ours() -> None:
    deep = "import torch.distributed as dist\ndist.init_process_group()\nx = " + "+".join(
        ["1"] * 3000
    )
    look_at(
        {"a.py": f"{deep}\n", "b.py": "x = " + "f(" * 90 + ")" * 90, "c.py": "x = a" + ".b" * 3000}
    )
