"""A lost event is found, and what a kill leaves is not mistaken for one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from drumline.report.verify.event_check import check_events
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
    check_events(folder, part, **{"saved_steps": set(), "hosts": {}, **options})
    return part


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
    assert problems(check(tmp_path, lines, saved_steps={4})) == []
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


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "rank-00001.jsonl").mkdir()
    part = check(tmp_path, attempt(world_size=2))
    assert problems(part) == ["rank-00001.jsonl: cannot be read: Is a directory"]


@pytest.mark.parametrize(
    ("change", "damage"),
    [
        ({"step": "x"}, "Expected `int`, got `str` - at `$.step`"),
        ({"step": None}, "Expected `int`, got `null` - at `$.step`"),
        ({"step": True}, "Expected `int`, got `bool` - at `$.step`"),
        ({"number": "2"}, "Expected `int`, got `str` - at `$.number`"),
        ({"kind": 3}, "Expected `str`, got `int` - at `$.kind`"),
        ({"kind": "start", "world_size": None}, "Expected `int`, got `null` - at `$.world_size`"),
        ({"kind": "start", "world_size": 0}, "Expected `int` >= 1 - at `$.world_size`"),
        ({"number": ...}, "Object missing required field `number`"),
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
