"""Rules are asked and findings sifted: in order, without what is silenced, and a rule that fails
ends nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from drumline_lint import linter as run
from drumline_lint.findings import Finding, Place, Severity
from drumline_lint.reading.source import Source
from drumline_lint.settings import Settings
from made_up_rules import BAD, RULES, USUAL, report_of, rule, told


def test_findings_come_in_the_order_of_their_places() -> None:
    report = report_of({"b.py": "poor()\nbad(), poor()\n", "a.py": "\n\nodd(bad())\n"})
    assert told(report.findings) == [
        *("a.py:3:1 DL201", "a.py:3:5 DL101"),
        *("b.py:1:1 DL102", "b.py:2:1 DL101", "b.py:2:8 DL102"),
    ]


def test_what_is_hidden_is_kept() -> None:
    report = report_of({"a.py": "bad()\nodd()\n"}, settings=USUAL)
    assert (told(report.findings), told(report.hidden)) == (["a.py:1:1 DL101"], ["a.py:2:1 DL201"])


def test_what_is_set_aside_has_notes() -> None:
    code = "bad()\n"
    report = report_of({"archived/runs/a.py": code, "tools/a.py": code})
    assert [finding.severity for finding in report.findings] == [Severity.NOTE, Severity.ERROR]


@pytest.mark.parametrize(
    ("code", "count"),
    [
        ("bad()  # noqa\n", 0),
        ("bad()  # noqa: DL101\n", 0),
        ("bad()  # noqa: E501, dl101\n", 0),
        ("bad()  # noqa: DL102\n", 1),
        ("bad(\n    1,  # noqa: DL101\n)\n", 0),
        ("bad(\n    1,\n)  # noqa: DL101\n", 0),
        ("x = [\n    bad(),\n    1,\n]  # noqa: DL101\n", 0),
        ("x = [  # noqa: DL102\n    bad(),\n    1,\n]  # noqa: DL101\n", 0),
        ("x = [  # noqa\n    bad(),\n    1,\n]  # noqa: DL102\n", 0),
        ("if (\n    bad()\n):  # noqa: DL101\n    pass\n", 0),
        ("if x:  # noqa\n    bad()\n", 1),
        ("if x:\n    bad()\n    good()  # noqa\n", 1),
        ("match x:  # noqa\n    case 1:\n        bad()\n", 1),
        ("def f():\n    bad()\n\n\nx = 1  # noqa\n", 1),
        ("bad()  # noqa: bad-call\n", 0),
        ("bad()  # noqa: E501, Bad-Call - it is meant\n", 0),
        ("bad()  # noqa: poor-call\n", 1),
        ("# noqa\nbad()\n", 1),
        ("bad()\n# noqa\n", 1),
    ],
)
def test_a_line_may_ask_for_silence(code: str, count: int) -> None:
    assert len(report_of({"a.py": code}).findings) == count


def test_a_finding_is_silenced_where_it_is_and_told_once() -> None:
    """Though another file may have led to it."""

    def look(program: Any, source: Any) -> Iterator[Finding]:
        for one in sorted(program.sources, key=lambda one: str(one.path)):
            yield BAD.RULE.at(one, one.tree.body[0], "found")

    files: dict[str, str | bytes] = {"a.py": "x = 1\n", "b.py": "x = 1  # noqa: DL101\n"}
    report = report_of(files, {"DL101": SimpleNamespace(RULE=BAD.RULE, check=look)})
    assert told(report.findings) == ["a.py:1:1 DL101"]


def failing(error: Exception) -> Any:
    def look(program: Any, source: Any) -> Iterator[Finding]:
        yield BAD.RULE.at(source, source.tree.body[0], "before")
        if "b.py" in str(source.path):
            raise error

    return SimpleNamespace(RULE=rule("DL103", "failing", Severity.ERROR), check=look)


def test_a_rule_that_fails_is_reported_and_the_others_continue() -> None:
    files: dict[str, str | bytes] = {"a.py": "bad()\n", "b.py": "bad()\n"}
    report = report_of(files, {"DL103": failing(KeyError("left")), **RULES})
    assert "b.py:1:1 DL101" in told(report.findings)
    (said,) = report.problems
    assert (str(said.place), said.rule, said.severity) == ("b.py:1:1", "DL999", "error")
    assert said.message.startswith(
        "rule DL103 failed on this file, which is a bug of drumline-lint: KeyError: 'left' (test_linter.py, line "
    )
    assert said.fix.startswith("please report it")


def test_code_too_deep_for_a_rule_is_no_mistake_of_the_rule() -> None:
    (said,) = report_of({"b.py": "x\n"}, {"DL103": failing(RecursionError())}).problems
    assert (said.rule, said.message) == ("DL000", "the code is nested too deeply for rule DL103")


def test_one_file_that_is_not_understood_does_not_lose_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = run.Program

    def understand(sources: list[Source]) -> Any:
        if any("b.py" in str(source.path) for source in sources):
            raise ValueError("no")
        return real(sources)

    monkeypatch.setattr(run, "Program", understand)
    report = report_of({"a.py": "bad()\n", "b.py": "bad()\n", "c.py": "bad()\n"})
    assert told(report.findings) == ["a.py:1:1 DL101", "c.py:1:1 DL101"]
    (said,) = report.problems
    assert str(said.place) == "b.py:1:1"
    assert said.message.startswith(
        "the reading of names failed on this file, which is a bug of drumline-lint: Value"
    )


def test_files_that_are_not_understood_together_are_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = run.Program

    def understand(sources: list[Source]) -> Any:
        if len(sources) > 1:
            raise ValueError("no")
        return real(sources)

    monkeypatch.setattr(run, "Program", understand)
    report = report_of({"a.py": "import b\nbad()\n", "b.py": "bad()\n"})
    assert told(report.problems) == ["a.py:1:1 DL999"]


def test_most_rules_are_for_distributed_code() -> None:
    many = SimpleNamespace(RULE=replace(BAD.RULE, only_distributed=True), check=BAD.check)
    files: dict[str, str | bytes] = {
        "alone.py": "bad()\n",
        "many.py": "import torch.distributed as dist\ndist.init_process_group()\nbad()\n",
    }
    assert told(report_of(files, {"DL101": many}).findings) == ["many.py:3:1 DL101"]
    assert len(report_of(files).findings) == 2


def test_scripts_are_asked_by_rules_for_scripts() -> None:
    made = rule("DL301", "loud", Severity.WARNING)

    def look(script: Any) -> Iterator[Finding]:
        line = script.text.count("\n")
        place = Place(path=str(script.path), line=line, column=1, end_line=line, end_column=5)
        yield made.at(SimpleNamespace(place=lambda node: node), place, "the last line is loud")

    rules = {"DL301": SimpleNamespace(RULE=made, check_shell=look), **RULES}
    files: dict[str, str | bytes] = {"run.sh": "x=1\necho 1\n", "a.py": "x\n"}
    assert told(report_of(files, rules).findings) == ["run.sh:2:1 DL301"]
    assert not report_of({"run.sh": "x=1\necho 1  # noqa: DL301\n"}, rules).findings


def test_rules_that_are_not_wanted_are_not_asked() -> None:
    settings = Settings(chosen=frozenset({"DL000", "DL999"}))
    assert not report_of({"b.py": "x\n"}, {"DL103": failing(KeyError())}, settings).problems


def test_problems_may_be_ignored_too() -> None:
    settings = Settings(chosen=frozenset({"DL101"}))
    assert not report_of({"b.py": "x = (\n"}, settings=settings).problems


def test_notes_alone_do_not_fail() -> None:
    assert report_of({"a.py": "odd()\n"}).is_clean
    assert not report_of({"a.py": "odd()\npoor()\n"}).is_clean
    assert report_of({"a.py": "poor()\n"}, settings=Settings(chosen=frozenset())).is_clean
