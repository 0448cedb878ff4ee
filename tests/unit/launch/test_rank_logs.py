"""What a screen gets of a file that grows: whole lines, never too many, never what a terminal could
not bear."""

from __future__ import annotations

from pathlib import Path

import pytest

from drumline.launch.node import rank_logs
from drumline.launch.node.rank_logs import MAX_LAG, MAX_LINE, LogFollower, decoded, last_lines


def test_lines_are_given_when_they_are_whole(tmp_path: Path) -> None:
    path = tmp_path / "file"
    follower = LogFollower(path)
    assert follower.read() == []
    with path.open("wb", buffering=0) as file:
        file.write(b"one\ntw")
        assert follower.read() == ["one"]
        assert follower.read() == []
        file.write(b"o\nthr")
        assert follower.read() == ["two"]
    assert follower.rest() == ["thr"]
    assert follower.rest() == []


def test_a_long_line_is_cut_and_the_next_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"y" * rank_logs.MAX_READ + b"\nnext\n")
    follower = LogFollower(path)
    lines = [line for _ in range(5) for line in follower.read()]
    assert lines == ["y" * MAX_LINE + " ...", "next"]
    path.write_bytes(b"z" * 3 * rank_logs.MAX_READ)
    endless = LogFollower(path)
    assert [line for _ in range(5) for line in endless.read()] == ["z" * MAX_LINE + " ..."]


def test_a_follower_far_behind_skips_lines_and_reports_it(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"first\n" + b"many\n" * MAX_LAG)
    lines = LogFollower(path).rest()
    skipped = 5 * MAX_LAG + 6 - 2 * rank_logs.KEPT_OF_LAG
    notice = f"... {skipped:,} bytes are not shown; see {path}"
    assert lines[0] == "first"
    assert notice in lines
    assert len(set(lines[1:]) - {"many", notice}) <= 1, "the first may be cut"
    assert len(lines) < rank_logs.KEPT_OF_LAG


def test_of_a_flood_at_the_end_the_last_lines_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_bytes(b"many\n" * rank_logs.MAX_REST + b"no end")
    lines = LogFollower(path).rest()
    assert lines[-2:] == ["many", "no end"]
    assert any("bytes are not shown; see" in line for line in lines)
    assert len(lines) < 20_000, "as many as wait for a screen"


def test_the_rest_has_an_end_though_somebody_writes_on(tmp_path: Path) -> None:
    class Growing(LogFollower):
        num_reads = 0

        def _new_bytes(self, most: int = rank_logs.MAX_READ) -> bytes:
            self.num_reads += 1
            assert self.num_reads < 10
            with self.path.open("ab") as file:
                file.write(b"more\n" * 5)
            return super()._new_bytes(most)

    path = tmp_path / "file"
    path.write_bytes(b"first\n")
    assert Growing(path).rest()[0] == "first"


def test_a_progress_bar_is_shown_now_and_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    follower = LogFollower(path)
    with path.open("wb", buffering=0) as file:
        file.write(b"\r 10%\r 20%")
        assert follower.read() == []
        monkeypatch.setattr(rank_logs, "PROGRESS_EVERY_S", 0)
        assert follower.read() == [" 10%"]
        file.write(b"\r100%\n")
        assert follower.read() == ["100%"]


def test_bytes_that_are_no_text_are_replaced() -> None:
    assert decoded(b"a\xff\tb\x1b[31mred\r") == "a\ufffd\tb\x1b[31mred", (
        "the screen makes the rest visible"
    )
    assert decoded("\N{SNOWMAN}".encode()) == "\N{SNOWMAN}"


def test_last_lines_begin_with_the_traceback(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("noise\n" * 50 + "Traceback (most recent call last):\n  File\nValueError: x\n")
    assert last_lines(path) == ["Traceback (most recent call last):", "  File", "ValueError: x"]
    path.write_text("noise\n" * 50)
    assert last_lines(path) == ["noise"] * 20
    assert last_lines(tmp_path / "none") == []
