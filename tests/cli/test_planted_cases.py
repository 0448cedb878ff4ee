"""How the benchmark of planted bottlenecks judges an advice, and whether its cases are complete."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.planted_cases import PlantedCase, read_cases, select, write_cases
from benchmarks.planted_profile import Outcome, print_summary, text_of

OPEN = Path(__file__).parents[2] / "benchmarks/planted/open"
HOOK = PlantedCase(
    name="hook",
    bottleneck="hook",
    job="slow_hook.py:Job",
    planted="a hook sleeps",
    where=["slow_hook.py:20"],
    names=[r"\bhook\b"],
    harmful=["more workers"],
)


@pytest.mark.parametrize(
    ("advice", "named"),
    [
        ("the hook Notify takes 80 ms", True),
        ("80 ms of a step are in slow_hook.py:22", True),
        ("80 ms of a step are in slow_hook.py:40", False),
        ("80 ms of a step are in fast_hook.py:20", False),
        ("the job hook.py has gaps", False),
        ("larger batches", False),
    ],
)
def test_an_advice_names_a_bottleneck_by_a_word_or_a_line(advice: str, named: bool) -> None:
    assert HOOK.is_named_by(advice) is named


def test_harmful_words_are_those_of_the_case() -> None:
    assert HOOK.is_harmed_by("More workers: --data.workers 2")
    assert not HOOK.is_harmed_by("run the hook every 50 steps")


def test_the_text_of_an_advice_has_all_its_fields_and_the_names_of_its_settings() -> None:
    advice = {"title": "a", "settings": {"data.workers": "2"}, "gain_s": 0.1, "more": ["c"]}
    assert text_of(advice) == "a data.workers 2 c"


def test_a_bottleneck_counts_only_if_all_its_jobs_are_right(
    capsys: pytest.CaptureFixture[str],
) -> None:
    right = Outcome(
        name="a",
        bottleneck="hook",
        named=True,
        harmful=False,
        failed=False,
        advice=["the hook"],
        seconds=1.0,
    )
    wrong = Outcome(
        name="b",
        bottleneck="hook",
        named=True,
        harmful=True,
        failed=False,
        advice=["more workers"],
        seconds=1.0,
    )
    print_summary([right, wrong])
    printed = capsys.readouterr().out
    assert "0 of 1 bottlenecks on all their jobs" in printed
    assert "1 of 2 named first, 1 harmful, 0 failed" in printed


def test_cases_are_written_as_they_were_read(tmp_path: Path) -> None:
    write_cases(tmp_path, [HOOK])
    assert read_cases(tmp_path) == [HOOK]
    assert select([HOOK], ["oo"], "cpu") == [HOOK]
    assert select([HOOK], [], "cuda") == []


def test_every_planted_line_is_in_its_file() -> None:
    for case in read_cases(OPEN):
        assert (OPEN / case.job.split(":")[0]).exists()
        assert case.is_healthy or case.where
        for place in case.where:
            file, number = place.split(":")
            assert "# planted" in (OPEN / file).read_text().splitlines()[int(number) - 1], place


def test_the_open_half_has_twelve_bottlenecks_on_two_jobs_and_three_healthy_ones() -> None:
    cases = select(read_cases(OPEN), [], "cpu")
    bottlenecks = [case.bottleneck for case in cases if not case.is_healthy]
    assert len(set(bottlenecks)) == 12
    assert all(bottlenecks.count(bottleneck) == 2 for bottleneck in bottlenecks)
    assert sum(case.is_healthy for case in cases) == 3
    assert len(select(read_cases(OPEN), [], "cuda")) == 4
