"""Every rule: its own snippets, and at least three cases each in which it speaks and keeps
silent."""

from __future__ import annotations

import pytest

from drumline_lint.findings import Severity
from drumline_lint.rules import all_rules
from reading_cases import CASES, Case, files_of, findings_in, lines_of, read_cases

RULES = {number: module.RULE for number, module in all_rules().items()}
SNIPPETS = {"python": "snippet.py", "shell": "snippet.sh", "yaml": "snippet.yaml"}
EVERY_CASE = [
    case for path in sorted(CASES.glob("*.md")) for case in read_cases(path.stem, path.read_text())
]


def test_every_rule_has_three_cases_of_each_kind() -> None:
    assert {path.stem for path in CASES.glob("*.md")} == set(RULES)
    for number in RULES:
        kinds = [case.kind for case in EVERY_CASE if case.rule == number]
        assert (kinds.count("bad") >= 3, kinds.count("good") >= 3) == (True, True), (number, kinds)


@pytest.mark.parametrize("case", EVERY_CASE, ids=str)
def test_a_case(case: Case) -> None:
    assert bool(case.expected) == (case.kind == "bad"), (
        "a bad case marks its lines, a good one has none"
    )
    assert lines_of(case.rule, findings_in(case.files)) == case.expected


@pytest.mark.parametrize("number", RULES)
def test_the_snippets_that_the_user_sees(number: str) -> None:
    rule = RULES[number]
    name = SNIPPETS[rule.language]
    assert lines_of(number, findings_in(files_of(name, rule.bad))), "the bad one is bad"
    assert not lines_of(number, findings_in(files_of(name, rule.good))), "the good one is good"


@pytest.mark.parametrize("number", RULES)
def test_a_good_snippet_is_good_by_all_rules(number: str) -> None:
    rule = RULES[number]
    name = SNIPPETS[rule.language]
    found = findings_in(files_of(name, rule.good))
    assert not [
        (one.rule, one.message) for one in found if RULES[one.rule].severity is not Severity.NOTE
    ]


@pytest.mark.parametrize("number", RULES)
def test_the_words(number: str) -> None:
    rule = RULES[number]
    assert rule.id == number
    assert not rule.summary.endswith(".")
    assert not rule.fix.endswith(".")
    assert rule.why.endswith(".")
    assert rule.name == rule.name.lower()
    assert len({one.name for one in RULES.values()}) == len(RULES)
