"""The page: what it shows, that nothing of a run folder becomes markup, and that it stays small."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from drumline.cli.runs_command import _cells
from drumline.metrics.display import metric_text
from drumline.report.goodput import goodput_of
from drumline.report.page import render_page, write_report
from drumline.report.run_data import read_run
from drumline.report.run_list import listed
from drumline.runs.profile_result import write_profile
from tests.report_runs import (
    BEGIN,
    METRICS,
    SETS,
    append,
    write_checkpoint,
    write_run,
    write_run_of_many_metrics,
)
from tests.unit.runs.test_profile_result import example
from tests.unit.watch.diagnosis.test_diagnosis_files import told

EVIL = "</script><script>window.pwned=1</script><img src=x onerror='window.pwned=1'>\x1b[31m\u202e{{ 7*7 }}"


def text_of(page: str) -> str:
    """What a reader sees, without tags."""
    body = page.partition("<body")[2].partition('<script type="application/json"')[0]
    return " ".join(re.sub(r"<[^>]*>", " ", body).split())


def test_a_page_has_result_goodput_faults_and_slow_ranks(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", slow_rank=2, fault_at=120)
    write_profile(run, example())
    path = write_report([run], tmp_path / "page.html")
    text = text_of(path.read_text())
    for words in (
        "task digits state done steps 200 of 200 best checkpoint step 50",
        "52.2% of 46 s went to training and evaluation.",
        "rank 2 on node-a was slow in",
        "resumed 8.0 s after rank 1 on node-a was killed at step 120; 20 steps lost",
        "Table: 1 restart, 4 saves",
        "exposed communication 500 ms 16.7%",
        "The others wait for rank 0 in 1 step.",
        "drumline train digits",
        "optim.lr 0.1",
    ):
        assert words in text, f"{words}\n\n{text}"


def test_how_a_run_failed_is_below_its_state(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", ranks=1, ended=False)
    append(
        run,
        0,
        {
            "kind": "error",
            "number": 99,
            "step": 200,
            "time": BEGIN + 99,
            "message": "label 7",
        },
    )
    text = text_of(render_page([read_run(run)]))
    ending = "the run has ended: failed at step 200: label 7"
    assert text.count(ending) == 1
    assert text.index("state failed") < text.index(ending) < text.index("Curves")


def test_runs_are_side_by_side_with_what_differs(tmp_path: Path) -> None:
    first_run = write_run(tmp_path / "a" / "run", settings={"lr": "0.1", "momentum": "0.9"})
    second_run = write_run(
        tmp_path / "b" / "run", settings={"lr": "0.2", "momentum": "0.9"}, steps=100
    )
    page = render_page([read_run(first_run), read_run(second_run)])
    assert "200 of 200 100 of 100" in text_of(page)
    differs = text_of(page).partition("What differs")[2].partition("Curves")[0]
    assert "optim.lr 0.1 0.2" in differs
    assert "momentum" not in differs
    labels = [series["label"] for series in chart_data(page)[0]["series"]]
    assert labels == [
        f"{run} {kind}" for run in (first_run, second_run) for kind in ("training", "evaluation")
    ]


def chart_data(page: str) -> list[dict[str, list[dict[str, Any]]]]:
    document: list[dict[str, list[dict[str, Any]]]] = json.loads(
        page.partition('id="data">')[2].partition("</script>")[0]
    )
    return document


def test_what_a_hostile_folder_holds_is_text(tmp_path: Path) -> None:
    run = write_run(
        tmp_path / "run", task=EVIL, metric=EVIL, message=EVIL, slow_rank=1, settings={"lr": EVIL}
    )
    page = render_page([read_run(run), read_run(run)])
    assert page.count("<script") == 3, "the data, uPlot, and our own"
    assert not re.search(r"<img|onerror='", page)
    assert "\x1b" not in page
    assert "\u202e" not in page
    assert "{{ 7*7 }}" in page
    assert html.escape("</script><script>window.pwned=1</script>") in page


def test_only_the_scripts_of_the_page_may_run(tmp_path: Path) -> None:
    page = render_page([read_run(write_run(tmp_path / "run"))])
    policy = re.findall(r'Content-Security-Policy" content="([^"]+)"', page)[0].replace(
        "&#39;", "'"
    )
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules.keys() == {"default-src", "script-src", "style-src", "base-uri", "form-action"}
    assert {rules[name] for name in ("default-src", "base-uri", "form-action")} == {"'none'"}
    for tag, rule in (("script", "script-src"), ("style", "style-src")):
        texts = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        hashes = [
            base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts
        ]
        assert rules[rule] == " ".join(f"'sha256-{hash_}'" for hash_ in hashes)
    assert not re.search(r"<[^>]+ (style|on\w+)=", page), "the policy forbids these"
    without_scripts = re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL)
    assert not re.search(r"(src|href)=|url\(|@import|https?://", without_scripts)


def test_what_is_not_shown_of_a_long_run_is_counted(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", ranks=1, steps=30_000)
    straggler = {"kind": "straggler", "step": 200, "time": BEGIN, "message": "x"}
    append(folder, 0, *[straggler] * 998)
    run = replace(read_run(folder), num_bytes=90_000_000, num_bytes_read=64_000_000)
    page = render_page([run])
    loss = chart_data(page)[0]["series"]
    shown = sum(len(series["x"]) for series in loss)
    assert 1_000 < shown < 1_900
    for words in (
        f"{shown:,} of 6,600 points: each stretch of a curve has its lowest and highest.",
        "64 MB of 90 MB of the events of rank 0 were read, at equal distances.",
        "600 saves; 400 of 1,001 events",
    ):
        assert words in text_of(page)


def test_a_metric_does_not_replace_a_fact(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", ranks=1))
    run.metrics = {"state": 0.5, "task": 0.5, "steps": 0.5, "accuracy": 0.5}
    page = text_of(render_page([run]))
    assert "task digits state done steps 200 of 200 best" in page
    assert "Latest evaluation state 0.5000 task 0.5000 steps 0.5000 accuracy 50.00%" in page


def test_a_profile_in_which_no_rank_is_waited_for_names_none(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", ranks=1))
    profile = example()
    for ranks in ((), tuple(replace(rank, critical_steps=0) for rank in profile.ranks)):
        run.profile = replace(profile, ranks=ranks)
        text = text_of(render_page([run]))
        assert "of communication is hidden behind compute." in text
        assert "The others wait for" not in text


def test_a_run_without_events_has_a_page(tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    assert "state own loop steps 0" in text_of(render_page([read_run(tmp_path / "run")]))


@pytest.mark.parametrize(
    "events",
    [
        [{"kind": "checkpoint", "bytes": 1, "seconds": float("inf"), "blocked_s": 1.0}],
        [
            {
                "kind": "checkpoint",
                "bytes": float("inf"),
                "seconds": 1.0,
                "copy": "host",
                "blocked_s": float("inf"),
            }
        ],
        [{"kind": "evaluation", "seconds": 1e308}] * 2,
        [{"kind": "checkpoint", "blocked_s": 1e308}] * 2,
        [{"kind": "first_step", "seconds": 1e308}, {"kind": "first_step", "seconds": -1e308}],
        [{"kind": "evaluation", "seconds": 5}, {"kind": "checkpoint", "blocked_s": -5}],
    ],
)
def test_durations_that_cannot_be_true_are_left_out(
    tmp_path: Path, events: list[dict[str, object]]
) -> None:
    (tmp_path / "run" / "events").mkdir(parents=True)
    append(tmp_path / "run", 0, *({"step": 1, "time": BEGIN, **event} for event in events))
    run = read_run(tmp_path / "run")
    assert 0 <= goodput_of(run.attempts).total_s < 10
    assert "went to training and evaluation" in text_of(render_page([run]))


def test_a_diagnosis_of_an_impossible_time_is_left_out(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", ranks=1)
    for moment in (BEGIN, 1e300, -1e300, float("inf")):
        path = told(run / "diagnoses")
        path.write_text(json.dumps({**json.loads(path.read_text()), "time": moment}))
    read = read_run(run)
    assert [moment.time for moment in read.moments if moment.kind == "fault"] == [BEGIN]
    assert "Timeline" in text_of(render_page([read]))


@pytest.mark.parametrize("refresh_s", [None, 5.0])
def test_only_a_live_page_loads_itself_again(tmp_path: Path, refresh_s: float | None) -> None:
    page = render_page([read_run(write_run(tmp_path / "run"))], refresh_s=refresh_s)
    is_live = refresh_s is not None
    assert ('<meta http-equiv="refresh" content="5">' in page, 'data-refresh="5"' in page) == (
        is_live,
        is_live,
    )


def test_all_metrics_of_all_sets_are_shown(tmp_path: Path) -> None:
    run = read_run(write_run_of_many_metrics(tmp_path / "run"))
    page = text_of(render_page([run]))
    assert len(run.metrics) == 36
    for metric in METRICS:
        values = [metric_text(metric, run.metrics[f"{name}/{metric}"]) for name in SETS]
        assert f" {metric} {' '.join(values)} " in page
    several = text_of(render_page([run, run]))
    for name, value in run.metrics.items():
        text = metric_text(name, value)
        assert f" {name} {text} {text} " in several


def test_the_page_of_an_own_loop_has_its_newest_checkpoint_and_no_times(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "own" / "checkpoints", 120)
    page = text_of(render_page([read_run(tmp_path / "own")]))
    assert "state own loop steps 120" in page
    assert (
        "A loop of your own writes checkpoints and no events: there are no times and curves of it."
        in page
    )
    assert "goodput" not in page


def test_a_run_that_a_hook_ended_early_is_shown_as_such(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", ranks=1, steps=100)
    events = run / "events" / "rank-00000.jsonl"
    ended = events.read_text().replace('"total_steps": 100', '"total_steps": 1000')
    events.write_text(
        ended.replace('"best_step": 50', '"best_step": 50, "stopped": "loss did not improve"')
    )
    assert "steps 100 of 1,000" in text_of(render_page([read_run(run)]))
    assert "stopped loss did not improve" in text_of(render_page([read_run(run)]))
    assert _cells(listed(run))[:4] == (str(run), "digits", "done", "100/1,000 (ended early)")
