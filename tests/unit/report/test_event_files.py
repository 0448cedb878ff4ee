"""A lost event is found, and what a kill leaves is not mistaken for one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from drumline.report.verify.event_check import check_events
from drumline.report.verify.ledger_history import History, LedgerStart
from drumline.report.verify.section import Section


def event(number: int, kind: str, step: int = 0, **fields: Any) -> str:
    return json.dumps({"number": number, "kind": kind, "step": step, **fields})


def attempt(
    *, start: int = 0, steps: int = 4, world_size: int = 1, ends: bool = False
) -> list[str]:
    """A start, a resume unless at step 0, some steps, and the end."""
    lines = [event(0, "start", 0, world_size=world_size)]
    if start:
        lines.append(event(1, "resume", start))
    lines += [event(len(lines) + number, "train", start + number + 1) for number in range(steps)]
    return [*lines, event(len(lines), "end", start + steps)] if ends else lines


def check(folder: Path, *ranks: list[str], **options: Any) -> Section:
    for rank, lines in enumerate(ranks):
        (folder / f"rank-{rank:05d}.jsonl").write_text("\n".join(lines) + "\n")
    part = Section("events")
    check_events(folder, part, **{"history": None, "hosts": {}, "is_at_work": False, **options})
    return part


def ledger(*starts: tuple[int, int, list[int]]) -> History:
    """Starts: the step, the number of ranks and the steps of the saves."""
    return History(
        [LedgerStart(1, step, 0, 0, world_size, 8, 37, 0) for step, world_size, _ in starts],
        [],
        [saves for *_, saves in starts],
    )


def problems(part: Section) -> list[str]:
    return [str(problem).partition("/")[2] for problem in part.problems]


def test_attempts_of_any_number_of_ranks_have_no_problems(tmp_path: Path) -> None:
    first = attempt(world_size=2)
    part = check(tmp_path, [*first, *attempt(start=4, ends=True)], first)
    assert problems(part) == []
    assert part.summary == "17 events of 2 ranks in 2 attempts, none missing"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lines: lines.pop(3), "line 4: 1 event missing above it: its number is 4, not 3"),
        (lambda lines: lines.pop(0), "line 1: the first 1 event of an attempt missing above it"),
        (lambda lines: lines.insert(3, lines[2]), "line 4: event 2 occurs twice"),
        (lambda lines: lines.__setitem__(2, lines[2][:20]), "line 3: unreadable; an event is lost"),
        (lambda lines: lines.__setitem__(2, "[1, 2]"), "line 3: unreadable; an event is lost"),
        (lambda lines: lines.__setitem__(-1, "{"), "line 12: unreadable; an event is lost"),
        (
            lambda lines: lines.__setitem__(slice(2, 4), ["{", "{"]),
            "line 3: unreadable; an event is lost",
        ),
        (lambda lines: lines.pop(5), "line 6: the first 1 event of an attempt missing above it"),
        (
            lambda lines: lines.__delitem__(slice(0, 5)),
            "line 2: resumes at step 4, but the events above reach only step 0",
        ),
    ],
)
def test_what_is_lost_is_named(tmp_path: Path, change: Any, message: str) -> None:
    lines = [*attempt(), *attempt(start=4, ends=True)]
    change(lines)
    assert f"rank-00000.jsonl, {message}" in problems(check(tmp_path, lines))


def test_an_incomplete_line_at_the_end_of_an_attempt_is_a_note(tmp_path: Path) -> None:
    (tmp_path / "rank-00000.jsonl").write_text(
        "\n".join([*attempt(), '{"number": 5, "ki', *attempt(start=4), '{"number": 6, "k'])
    )
    part = check(tmp_path)
    assert problems(part) == []
    assert [note.what for note in part.notes] == [
        "cut off by a kill, at the end of an attempt",
        "cut off by a kill, or being written",
    ]


def test_a_resume_that_only_the_ledger_knows_of_is_fine(tmp_path: Path) -> None:
    lines = [*attempt(steps=3), *attempt(start=4)]
    lines[1:4] = [event(number, "note", number) for number in (1, 2, 3)]
    assert problems(check(tmp_path, lines, history=ledger((0, 1, [4]), (4, 1, [])))) == []
    assert problems(check(tmp_path, lines)) == [
        "rank-00000.jsonl, line 6: resumes at step 4, but the events above reach only step 3"
    ]


def test_a_rank_without_a_file_is_named(tmp_path: Path) -> None:
    lines = attempt(world_size=2)
    assert problems(check(tmp_path, lines)) == ["rank-00001.jsonl: is missing: the run had 2 ranks"]
    assert problems(check(tmp_path, lines, hosts={0: "a", 1: "a"})) != []
    elsewhere = check(tmp_path, lines, hosts={0: "a", 1: "b"})
    assert problems(elsewhere) == []
    assert "rank 1 ran on b, and may have written it there" in elsewhere.notes[0].what


def test_a_rank_whose_last_events_are_gone_is_named(tmp_path: Path) -> None:
    lines = attempt(world_size=2, ends=True)
    assert problems(check(tmp_path, lines, lines[:-2])) == [
        "rank-00001.jsonl, line 4: the events stop at step 3, but rank 0 has the train event of step 4"
    ]
    assert problems(check(tmp_path, lines[:-1], lines[:-1])) == [], "killed before the end"


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "rank-00001.jsonl").mkdir()
    part = check(tmp_path, attempt(world_size=2))
    assert problems(part) == ["rank-00001.jsonl: cannot be read: Is a directory"]


@pytest.mark.parametrize(
    ("change", "damage"),
    [
        ({"step": "x"}, "step is 'x'"),
        ({"step": None}, "step is None"),
        ({"step": True}, "step is True"),
        ({"number": "2"}, "number is '2'"),
        ({"kind": 3}, "kind is 3"),
        ({"kind": "start", "world_size": None}, "world_size is None"),
        ({"kind": "start", "world_size": 0}, "world_size is 0"),
        ({"number": ...}, "it has no number"),
    ],
)
def test_a_damaged_event_is_named(tmp_path: Path, change: dict[str, Any], damage: str) -> None:
    lines = [*attempt(world_size=2), *attempt(start=4, world_size=2, ends=True)]
    for number in (2, 5, 6, 11):  # train, start, resume, end
        record = {**json.loads(lines[number]), **change}
        damaged = json.dumps({name: value for name, value in record.items() if value is not ...})
        part = check(tmp_path, [*lines[:number], damaged, *lines[number + 1 :]], lines)
        assert f"rank-00000.jsonl, line {number + 1}: damaged: {damage}" in problems(part)
        assert "none missing" not in part.summary


def test_a_number_of_ranks_that_no_run_has_does_not_drown_the_rest(tmp_path: Path) -> None:
    assert len(problems(check(tmp_path, attempt(world_size=10**12)))) == 5


def logged(
    *, start: int = 0, stop: int = 12, total: int = 12, saves: tuple[int, ...] = (6, 12)
) -> list[str]:
    """An attempt of 2 ranks as rank 0 reports it, logged every 2 steps; rank 1 has all but the
    saves."""
    events: list[tuple[str, int, dict[str, int]]] = [
        ("start", 0, {"world_size": 2, "total_steps": total})
    ]
    events += [("resume", start, {})] if start else []
    for step in range(start + 1, stop + 1):
        events += [("train", step, {})] if step % 2 == 0 or step == total else []
        events += [("evaluation", step, {})] if step == total else []
        events += [("checkpoint", step, {})] if step in saves else []
    events += [("end", stop, {})] if stop == total else []
    return [
        event(number, kind, step, **fields) for number, (kind, step, fields) in enumerate(events)
    ]


def without_saves(lines: list[str]) -> list[str]:
    records = [record for record in map(json.loads, lines) if record["kind"] != "checkpoint"]
    return [json.dumps({**record, "number": number}) for number, record in enumerate(records)]


def test_tails_that_only_the_ledger_knows_of_are_missed(tmp_path: Path) -> None:
    zero = logged()
    expected = without_saves(logged())
    history = ledger((0, 2, [6, 10, 12]))
    assert problems(check(tmp_path, zero, expected, history=history)) == []
    assert problems(check(tmp_path, zero[:5], expected[:4], history=history)) == [
        "rank-00000.jsonl: the events stop at step 6, but the ledger has a later save after step 10"
    ]
    part = check(tmp_path, zero[:-3], expected[:-2], history=history)
    assert problems(part) == [], "killed before the save of step 12 was reported"


def test_a_tail_that_the_attempt_after_it_hides_is_missed(tmp_path: Path) -> None:
    first = logged(stop=8)
    second = logged(start=6)
    zero = [*first, *second]
    expected = [*without_saves(first), *without_saves(second)]
    assert problems(check(tmp_path, zero, expected)) == []
    del expected[2:5]
    assert problems(check(tmp_path, zero, expected)) == [
        "rank-00001.jsonl, line 2: the events stop at step 2, but rank 0 has the train event of step 6"
    ]
    assert problems(check(tmp_path, zero, expected[2:])) == [
        "rank-00001.jsonl: has 1 attempt of it, but rank 0 has 2 that took steps"
    ]


@pytest.mark.parametrize("cut_0", range(1, 10))
def test_ranks_that_are_killed_at_the_same_time_lack_nothing(tmp_path: Path, cut_0: int) -> None:
    """Wherever rank 0 was killed, rank 1 may be between the last and the next event that they
    share."""
    zero = logged()[:cut_0]
    expected = without_saves(logged())
    shared = sum(json.loads(line)["kind"] in ("train", "evaluation") for line in zero)
    saves = [record["step"] for record in map(json.loads, zero) if record["kind"] == "checkpoint"]
    least = (
        3 if saves else 0
    )  # what was reported by step 6, which rank 1 was at when that was saved
    for num_shared in range(max(least, shared - 1), min(7, shared + 1) + 1):
        part = check(tmp_path, zero, expected[: 1 + num_shared], history=ledger((0, 2, saves)))
        assert problems(part) == []


def test_an_end_that_is_missing_is_reported_unless_rank_0_may_have_been_killed_while_it_saved(
    tmp_path: Path,
) -> None:
    zero = logged()
    expected = without_saves(logged())
    assert problems(check(tmp_path, zero, expected[:-1])) == [
        "rank-00001.jsonl, line 8: the end is missing, which rank 0 reported"
    ]
    assert problems(check(tmp_path, zero[:-1], expected)) == [
        "rank-00000.jsonl, line 10: the end is missing, which rank 1 reported"
    ]
    assert problems(check(tmp_path, zero[:-2], expected)) == []


def test_a_job_at_work_is_not_taken_for_one_that_lost_its_events(tmp_path: Path) -> None:
    zero = logged()
    expected = without_saves(logged())
    assert problems(check(tmp_path, zero[:3], expected, is_at_work=True)) == []
    assert problems(check(tmp_path, zero[:3], expected)) != []
