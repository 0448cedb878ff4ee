"""The matrix and the report: readable for 2, 8, 64 and 256 hosts, and true."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from types import FrameType

import pytest

from drumline.base.text import bit_rate, latency
from drumline.net.dial import Reason
from drumline.tools.doctor.doctor_report import (
    all_letters,
    as_json,
    finding_lines,
    matrix_lines,
    report,
    result_line,
)
from drumline.tools.doctor.finding import Finding
from drumline.tools.doctor.pairs.pair_checks import pair_findings
from tests.unit.tools.doctor.simulated import Cluster, examine


def test_two_hosts_are_shown_in_numbers() -> None:
    lines = list(matrix_lines(examine(Cluster(2))))
    assert lines == [
        "every pair: bits per second, and latency",
        "from \\ to  n000       n001",
        "n000                  9.6G 50us",
        "n001       9.7G 50us",
        "2 links, 2 fine; median 9.6 Gbit/s (slowest 9.6 Gbit/s), 50 us (longest 50 us)",
    ]


def test_what_is_wrong_stands_where_the_numbers_would() -> None:
    cluster = Cluster(5, down=[4], closed={(0, 1)}, unnamed={(1, 2)}, holes={(2, 3)})
    survey = examine(cluster)
    survey.edge(1, 0).rendezvous = Reason.NO_ANSWER
    survey.edge(3, 0).bytes_per_s = None
    assert all_letters(survey) == [" C..-", "R N.-", ".. M-", "?.. -", "---- "]
    cells = [cell.strip() for line in matrix_lines(survey) for cell in line.split("  ")]
    assert {"closed", "no rendezvous", "no name", "MTU hole", "?", "absent"} <= set(cells)


def test_a_slow_link_is_marked_beside_its_number() -> None:
    text = "\n".join(matrix_lines(examine(Cluster(4, slow=[1]))))
    assert "800M slow 50us" in text


def test_dozens_of_hosts_are_shown_in_letters_of_which_each_is_explained() -> None:
    lines = list(matrix_lines(examine(Cluster(64, closed={(3, 60)}, slow=[9]))))
    assert max(map(len, lines[:-2])) <= 80
    row = next(line for line in lines if line.startswith(" 3  n003"))
    assert row.split("  ")[-1] == "... .....s" + "." * 50 + "C..."
    assert lines[1].endswith("to 0         10        20        30        40        50        60")
    assert lines[-2].startswith("4,032 links, 3,905 fine")
    assert lines[-1] == ". fine; s slow; C data ports closed"


def finding(where: str, what: str = "it is cold", level: str = "problem") -> Finding:
    return Finding(level=level, check="weather", where=where, what=what, fix="a coat")  # type: ignore[arg-type]


def test_the_same_of_several_hosts_is_reported_once() -> None:
    lines = [
        text for _, text in finding_lines([finding("a"), finding("b", level="note"), finding("c")])
    ]
    assert lines == [
        "problem: a and c: it is cold",
        "  fix: a coat",
        "note: b: it is cold",
        "  fix: a coat",
    ]


def test_of_one_kind_no_more_than_can_be_read() -> None:
    lines = [
        text
        for _, text in finding_lines(
            [finding("a", f"it is {number} degrees") for number in range(15)]
        )
    ]
    assert len(lines) == 2 * 12 + 1
    assert lines[-1] == "problem: weather: 3 more of this kind; --json has all"


def test_the_result() -> None:
    warning = finding("a", level="warning")
    late = finding("b", "it is late")
    assert result_line([]) == "result: ready to train"
    assert result_line([warning]) == "result: ready to train, with 1 warning"
    findings = [finding("a"), finding("b"), late, warning]
    assert result_line(findings) == "result: not ready to train: 2 problems and 1 warning"


@pytest.mark.parametrize("is_terminal", [False, True])
def test_the_report_in_its_order(is_terminal: bool, capsys: pytest.CaptureFixture[str]) -> None:
    survey = examine(Cluster(3, closed={(0, 1)}))
    report(pair_findings(survey), survey=survey, is_terminal=is_terminal)
    out = capsys.readouterr().out
    parts = ["every pair", "6 links, 5 fine", "problem: n000 -> n001", "result:"]
    places = [out.index(part) for part in parts]
    assert places == sorted(places)
    assert (
        "fix: open TCP 1024-65535 on n001 for the job's hosts (AWS: all traffic from the security group itself)\n"
        in out
    )


def test_json_has_all() -> None:
    survey = examine(Cluster(3, closed={(0, 1)}, down=[2]))
    document = json.loads(as_json(pair_findings(survey), survey=survey, facts={"n000": {}}))
    assert document["result"] == "result: not ready to train: 2 problems"
    assert {entry["check"] for entry in document["findings"]} == {"host", "data ports"}
    assert {
        "from": "n000",
        "to": "n001",
        "addresses": ["10.9.0.2"],
        "data": "no answer",
    } in document["network"]["edges"]
    assert document["network"]["hosts"][2]["absent"].startswith("it is unreachable")


def test_numbers_as_people_say_them() -> None:
    assert [bit_rate(value) for value in (12.5e9, 1.18e9, 1e7, 6e3, 20)] == [
        "100 Gbit/s",
        "9.4 Gbit/s",
        "80 Mbit/s",
        "48 kbit/s",
        "160 bit/s",
    ]
    assert [latency(value) for value in (2.2e-5, 1.2e-4, 0.0123)] == ["22 us", "0.12 ms", "12 ms"]


def num_steps_of_python(function: Callable[[], None]) -> int:
    """Calls and lines, which a busy machine does not change as it changes seconds."""
    num_events = 0

    def count(frame: FrameType, event: str, argument: object) -> Callable[..., object]:
        nonlocal num_events
        num_events += 1
        return count

    sys.settrace(count)
    try:
        function()
    finally:
        sys.settrace(None)
    return num_events


def report_of(num_hosts: int) -> None:
    unnamed = {(number, 3) for number in range(num_hosts)}
    survey = examine(Cluster(num_hosts, closed={(1, 2)}, unnamed=unnamed))
    findings = pair_findings(survey)
    list(matrix_lines(survey))
    as_json(findings, survey=survey)


def test_the_work_grows_with_the_number_of_ways_and_no_faster() -> None:
    # 48 hosts have 4 times the ways of 24; a step that looks at all ways for each host makes it more.
    few = num_steps_of_python(lambda: report_of(24))
    many = num_steps_of_python(lambda: report_of(48))
    assert many < 4 * few
