"""What is said of how runs begin and end, with the names of the snippet that shows the mistake."""

from __future__ import annotations

import pytest

from drumline_lint.rules import all_rules
from reading_cases import findings_in

MESSAGES = {
    "DL043": "random_split(data, [0.9, 0.1]) draws another split on every rank: what one rank tests on, another trains "
    "on",
    "DL025": "dataset.map(tokenize).save_to_disk runs on one rank while the others wait in a barrier, "
    "which fails after the default timeout",
}


@pytest.mark.parametrize("rule", MESSAGES)
def test_the_text_about_the_snippet(rule: str) -> None:
    findings = findings_in((("train.py", all_rules()[rule].RULE.bad),))
    messages = [finding.message for finding in findings if finding.rule == rule]
    assert messages == [MESSAGES[rule]]
