"""How the fault matrix decides what is a correct report, a lost step, a new step. Without hosts."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from drumline.watch.diagnosis.diagnosis import PHASES, Cause, Diagnosis
from drumline.watch.diagnosis.watchdog import Recovery
from drumline.watch.heartbeat import Phase
from tests.multinode.faults.catalogue import Case
from tests.multinode.faults.matrix import Result, is_right
from tests.multinode.faults.plain import PlainResult
from tests.multinode.faults.reading import (
    Said,
    again,
    is_of_a_slow_start,
    is_recovery,
    said_in,
    sentences_on,
    steps_of,
)
from tests.multinode.faults.report import is_fine, report
from tests.multinode.faults.table import make_table
from tests.multinode.storm.strikes import Strike, Timeline, judge, table

STOPPED = Said(10.0, "hang", "stopped", "b", 3, "hang: rank 3 on b is stopped by a signal")


@pytest.mark.parametrize(
    ("said", "name", "right"),
    [
        (STOPPED, "stopped", True),
        (replace(STOPPED, rank=2), "stopped", False),
        (replace(STOPPED, host="a"), "stopped", False),
        (replace(STOPPED, cause="gil"), "stopped", False),
        (STOPPED, "worker_stopped", True),
        (replace(STOPPED, message="hang: rank 3 on b hangs"), "worker_stopped", False),
        (replace(STOPPED, cause="unreachable", rank=None), "host_gone", True),
        (replace(STOPPED, cause="unreachable", rank=None, host="a"), "host_gone", False),
        (replace(STOPPED, cause="unreachable", rank=None, host="a"), "cut", True),
    ],
)
def test_a_sentence_must_name_who_and_what(said: Said, name: str, right: bool) -> None:
    assert is_right(Case(name, 0, rank=3, step=20), said) is right


def test_only_a_stall_in_the_start_is_of_a_slow_start() -> None:
    slow = f"rank 3 on b is slow but alive: {PHASES[Phase.START]} for 9.6 s (1.0 cores)"
    assert is_of_a_slow_start(replace(STOPPED, word="stall", message=f"stall: {slow}"))
    assert not is_of_a_slow_start(replace(STOPPED, message=f"hang: {slow}"))
    assert not is_of_a_slow_start(
        replace(STOPPED, word="stall", message="stall: rank 3 on b is stopped")
    )


def test_a_run_that_goes_on_is_no_diagnosis() -> None:
    cut = Diagnosis(
        cause=Cause.UNREACHABLE,
        host="b",
        rank=None,
        step=None,
        what="b is unreachable",
        next_step="look at its link",
        is_certain=False,
        since_s=4.0,
    )
    continues = replace(STOPPED, word="stall", message=Recovery(cut, 12.0).sentence)
    assert is_recovery(continues)
    assert not is_recovery(STOPPED)


def event(kind: str, at: float, **fields: Any) -> str:
    return json.dumps(
        {"time": at, "number": 0, "kind": kind, "rank": 0, "host": "a", "step": 0, **fields}
    )


def test_what_was_said_and_done_is_read_from_the_events(tmp_path: Path) -> None:
    events = tmp_path / "run" / "events"
    events.mkdir(parents=True)
    hang = event(
        "hang", 9.0, rank=3, host="b", cause="stopped", message="hang: rank 3 on b is stopped"
    )
    (events / "watch.jsonl").write_text(f"{hang}\n")
    slow = "straggler: rank 1 on a takes 5.0x as long as its peers"
    lines = [
        event("start", 1.0),
        *(event("train", 1.0 + step / 10, step=step) for step in range(1, 18)),
        event("straggler", 2.8, message=slow, about_rank=1, about_host="a"),
        event("start", 15.0),
        *(event("train", 16.0 + step / 10, step=step) for step in range(11, 20)),
    ]
    (events / "rank-00000.jsonl").write_text("\n".join(lines) + "\n")

    sentences = said_in(tmp_path)
    assert [(sentence.word, sentence.host, sentence.rank) for sentence in sentences] == [
        ("straggler", "a", 1),
        ("hang", "b", 3),
    ]
    steps = steps_of(tmp_path, tmp_path / "run")
    assert [again(steps, 2.65).steps_lost, again(steps, 2.65).first_new_step] == [7, 17.1]
    assert again(steps, 18.0).first_new_step is None
    assert sentences_on([f"noise\n[b 3] {slow}\nhang: one\n"]) == ["hang: one"]


def test_a_case_that_went_wrong_is_reported_in_full() -> None:
    fine = Result(
        "stopped", 1, 3, "b", 20, [vars(STOPPED)], is_right=True, diagnosis_s=2.5, new_step_s=9.0
    )
    fine.has_right_bits = True
    assert is_fine(fine)
    assert not is_fine(replace(fine, said=[], is_right=False))
    assert not is_fine(replace(fine, has_right_bits=False))
    assert not is_fine(replace(fine, new_step_s=None))
    assert not is_fine(replace(fine, left_behind=["sleep"]))
    assert not is_fine(replace(fine, problems=["11 steps were lost"]))
    second = replace(STOPPED, rank=2, time=STOPPED.time + 1)
    text = report(
        replace(fine, said=[vars(STOPPED), vars(second)], is_right=False, screen=["one line"])
    )
    assert "wrong: what was said is not what was expected\nexpected: stopped, rank 3 on b\n" in text
    assert f"said: 2.5 s after it: stopped, host b, rank 3: {STOPPED.message}\n" in text
    assert "said: 3.5 s after it: stopped, host b, rank 2: " in text
    assert '"new_step_s": 9.0' in text
    assert "one line" in text


def test_the_table_counts_what_is_missing() -> None:
    results = [
        Result(
            "stopped", seed, 3, "b", 20, is_right=seed < 3, diagnosis_s=2.0 + seed, new_step_s=None
        )
        for seed in range(4)
    ]
    table = make_table(results, [PlainResult("stopped", 0)], cap_s=30)
    row = next(line for line in table.splitlines() if line.startswith("| SIGSTOP"))
    assert re.split(r" *\| *", row.strip("| "))[1:5] == ["4", "3", "3.5, 5.0", "none"]
    assert "nothing in 30" in row
    assert "0 of 1" in row


def test_a_storm_is_read_from_events_steps_and_the_screen(tmp_path: Path) -> None:
    events = tmp_path / "run" / "events"
    events.mkdir(parents=True)
    killed = event(
        "failure",
        101.0,
        rank=1,
        host="b",
        cause="killed",
        message="failure: rank 1 on b was killed",
    )
    cut = event(
        "stall",
        203.0,
        rank=None,
        host="b",
        cause="unreachable",
        message="stall: no heartbeat from b",
    )
    late_cut = event(
        "stall",
        303.0,
        rank=None,
        host="a",
        cause="unreachable",
        message="stall: no heartbeat from a",
    )
    (events / "watch.jsonl").write_text(f"{killed}\n{cut}\n{late_cut}\n")
    lines = [event("start", 0.0)]
    lines += [event("train", float(step), step=step) for step in range(1, 101)]
    lines += [event("start", 105.0)]
    # again from step 97, at 106 s
    lines += [event("train", 9.0 + step, step=step) for step in range(97, 192)]
    # after a pause until 212 s
    lines += [event("train", 20.0 + step, step=step) for step in range(192, 401)]
    (events / "rank-00000.jsonl").write_text("".join(f"{line}\n" for line in lines))
    log = tmp_path / "screen"
    log.write_text("words")
    timeline = Timeline()
    timeline.note(log)
    strikes = [
        Strike("kill", "b", 100.5, 0, rank=1),
        Strike("cut_10", "b", 200.5, 0),
        Strike("cut_5", "b", 300.5, 0),
        Strike("sidecar", "b", 350.5, 0),
        Strike("agent", "b", 380.5, 5),
    ]
    log.write_text("words the launcher's agent on b was killed by SIGKILL")
    timeline.note(log)
    judge(strikes, tmp_path, steps_of(tmp_path, tmp_path / "run"), log.read_bytes(), timeline)
    assert [strike.is_right for strike in strikes] == [True, True, False, True, True]
    assert [strike.right_s for strike in strikes[:4]] == [0.5, 2.5, None, None]
    assert [strike.new_step_s for strike in strikes[:2]] == [5.5, 11.5]
    assert [strike.steps_lost for strike in strikes[:2]] == [4, 0]
    rows = table(strikes, steps_of(tmp_path, tmp_path / "run")).splitlines()
    assert rows[2].startswith("| agent | 1 | 1 | ")
    assert "| cut_10 | 1 | 1 | 2.5, 2.5 | 11.5, 11.5 | 0, 0 |" in rows[3]
    assert rows[-1].startswith("| **all** | 5 | 4 |")
