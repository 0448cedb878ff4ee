"""One screen for all: in order, and never in the way."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from drumline.base.json_output import IS_WRAPPED
from drumline.launch.ssh.hosts_job import variables_for_ranks, wrong_variables
from drumline.launch.ssh.screen import MAX_WAITING, Screen


def test_lines_have_their_label_and_go_where_they_belong(tmp_path: Path) -> None:
    out = tmp_path / "out"
    err = tmp_path / "err"
    with out.open("wb") as first, err.open("wb") as second:
        screen = Screen(first.fileno(), second.fileno())
        screen.report("2 hosts")
        screen.show({"host": "a", "rank": 0}, ["one", "two"])
        screen.show({"host": "b"}, ["oh"], is_error=True)
        screen.report_last("last", "of all")
        screen.close()
    assert out.read_text() == "drumline: 2 hosts\n[a 0] one\n[a 0] two\n"
    assert err.read_text() == "[b] oh\ndrumline: last\n  of all\n"


def test_lines_of_a_host_are_objects_in_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(IS_WRAPPED, "1")
    place = {"host": "a", "rank": 3}
    with (tmp_path / "out").open("wb") as out:
        screen = Screen(out.fileno(), out.fileno())
        screen.show(place, ["one", '{"host": "b", "event": "train"}'])
        screen.show(place, ["Traceback (most recent call last):", "  x", "E: y"])
        screen.close()
    one, event, error = map(json.loads, (tmp_path / "out").read_text().splitlines())
    assert one["message"] == "one"
    assert event == {"event": "train", **place}
    assert error["message"].endswith("E: y")
    assert all(line["host"] == "a" and line["rank"] == 3 for line in (one, event, error))


def test_a_screen_that_does_not_scroll_blocks_nothing_and_gets_the_last_line() -> None:
    reading, writing = os.pipe()
    screen = Screen(writing, writing)
    # Nobody reads: this returns all the same.
    screen.show({"host": "a", "rank": 0}, ["x" * 100] * (MAX_WAITING + 5_000))
    with os.fdopen(reading) as reader:
        for _ in range(MAX_WAITING):
            assert reader.readline() == f"[a 0] {'x' * 100}\n"
        screen.report("again")
        rest = []
        while (line := reader.readline()) != "drumline: again\n":
            rest.append(line)
        screen.show({"host": "a", "rank": 0}, ["x" * 100] * (MAX_WAITING + 5_000))
        closing = threading.Thread(target=lambda: (screen.report_last("the last"), screen.close()))
        closing.start()
        while reader.readline() != "drumline: the last\n":
            pass
        closing.join()
    os.close(writing)
    # More than one, where the writing thread came late and made room while lines still came.
    notes = [line for line in rest if line.startswith("drumline: ")]
    assert notes
    assert all(line.endswith(" lines are not shown; the logs have them\n") for line in notes)


def test_a_closed_screen_is_no_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    screen = Screen(writing, writing)
    screen.show({"host": "a", "rank": 0}, ["x"] * 1000)
    screen.close()
    os.close(writing)
    assert not screen._thread.is_alive()


def test_few_variables_go_along_by_themselves() -> None:
    here = {
        "NCCL_DEBUG": "INFO",
        "HOME": "/h",
        "AWS_SECRET": "s",
        "OMP_NUM_THREADS": "2",
        "TOKEN": "t",
    }
    assert variables_for_ranks(["TOKEN", "A=b=c"], here) == {
        "NCCL_DEBUG": "INFO",
        "OMP_NUM_THREADS": "2",
        "TOKEN": "t",
        "A": "b=c",
    }
    assert list(wrong_variables(["A=", "TOKEN", "NONE", "1=secret"], here)) == [
        "--env NONE: is not set here; set it, or give --env NONE=VALUE",
        "--env: number 4 is neither NAME nor NAME=VALUE",
    ]
