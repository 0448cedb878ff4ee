"""The record of a rank's beats, as another process finds it: written, half written, or not ours at
all."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest

from drumline.watch import heartbeat
from drumline.watch.heartbeat import MAGIC, SIZE, HeartbeatWriter, Phase, read_heartbeat


def beat_of(path: Path) -> heartbeat.Heartbeat:
    beat = read_heartbeat(path)
    assert beat is not None
    return beat


def test_a_record_has_its_page_before_it_is_mapped(tmp_path: Path) -> None:
    heartbeat._make_file(tmp_path / "rank-00003.heartbeat").close()
    assert (tmp_path / "rank-00003.heartbeat").stat().st_blocks > 0, (
        "in a full /dev/shm a hole ends the rank by SIGBUS"
    )


def test_a_record_says_where_its_rank_is(tmp_path: Path) -> None:
    path = tmp_path / "rank-00003.heartbeat"
    assert read_heartbeat(path) is None
    before = time.monotonic()
    writer = HeartbeatWriter(path, rank=3)
    first = beat_of(path)
    assert (first.rank, first.pid, first.num_marks, first.step) == (3, os.getpid(), 0, 0)
    assert (first.phase, first.failure) == (Phase.START, "")
    assert first.entered_at == pytest.approx(before, abs=2)
    writer.begin_step(812)
    writer.count_collectives(4410)
    for phase in (Phase.DATA, Phase.FORWARD, Phase.BACKWARD):
        writer.mark(phase)
    writer.next_micro()
    writer.next_micro()
    now = beat_of(path)
    assert (now.num_marks, now.step, now.phase, now.micro, now.collective) == (
        3,
        812,
        Phase.BACKWARD,
        2,
        4410,
    )
    writer.begin_step(813)
    assert (beat_of(path).step, beat_of(path).micro) == (813, 0)
    assert (now.num_moves, now.moved_at, writer.num_marks) == (0, 0, 3)
    writer.move(4420)
    writer.move(None)
    moved = beat_of(path)
    assert (moved.num_moves, moved.collective, moved.num_marks) == (2, 4420, 3)
    assert moved.moved_at == pytest.approx(before, abs=2)


def test_marks_of_the_compiler_show_their_phase_and_are_not_counted(tmp_path: Path) -> None:
    path = tmp_path / "heartbeat"
    writer = HeartbeatWriter(path)
    writer.begin_step(7)
    writer.mark(Phase.USER)
    writer.mark(Phase.COMPILE, 0)
    time.sleep(0.01)
    assert (writer.phase, writer.step, beat_of(path).phase, beat_of(path).num_marks) == (
        12,
        7,
        Phase.COMPILE,
        1,
    )
    writer.mark(Phase.USER, 0)
    assert (beat_of(path).phase, beat_of(path).num_marks) == (Phase.USER, 1)
    assert beat_of(path).spent_s[Phase.COMPILE] >= 0.01


def test_time_is_counted_by_phase_and_tells_when_the_present_one_began(tmp_path: Path) -> None:
    path = tmp_path / "heartbeat"
    begun = time.monotonic()
    writer = HeartbeatWriter(path)
    for phase in (Phase.DATA, Phase.FORWARD) * 500:
        writer.mark(phase)
    slept = time.monotonic()
    time.sleep(0.02)
    marked = time.monotonic()
    writer.mark(Phase.SAVE)
    ended = time.monotonic()
    beat = beat_of(path)
    assert len(beat.spent_s) == len(Phase)
    # By the clock, not by 0.02 s: on a busy machine this process may be paused in any phase, for
    # longer than that. A microsecond for what adding floats loses.
    assert beat.spent_s[Phase.FORWARD] >= marked - slept - 1e-6
    assert 0 < beat.spent_s[Phase.DATA] <= slept - begun + 1e-6
    assert beat.spent_s[Phase.SAVE] == beat.spent_s[Phase.OPTIMIZER] == 0
    assert marked - 1e-6 <= beat.entered_at <= ended + 1e-6
    assert sum(beat.spent_s) <= ended - begun + 1e-6


@pytest.mark.parametrize(
    ("said", "read"),
    [
        ("ValueError: no such label", "ValueError: no such label"),
        ("x" * 511, "x" * 511),
        ("x" * 600, "x" * 508 + "..."),
        ("xü" * 200, "xü" * 169 + "x..."),  # a letter that is cut in two is left out
        ("not \udcff text", "not ? text"),
    ],
)
def test_the_last_error_is_kept(tmp_path: Path, said: str, read: str) -> None:
    writer = HeartbeatWriter(tmp_path / "heartbeat")
    writer.fail(said)
    writer.mark(Phase.LEFT)
    writer.fail("an error in cleaning up")
    assert (beat_of(tmp_path / "heartbeat").phase, beat_of(tmp_path / "heartbeat").failure) == (
        Phase.FAILED,
        read,
    )


def test_what_is_no_record_is_none(tmp_path: Path) -> None:
    path = tmp_path / "heartbeat"
    HeartbeatWriter(path)
    whole = path.read_bytes()

    def with_word(number: int, word: bytes) -> bytes:
        return whole[: number * 8] + word + whole[number * 8 + 8 :]

    foreign = {
        "empty": b"",
        "cut off": whole[:-1],
        "longer": whole + b"\0",
        "another magic": with_word(0, struct.pack("Q", MAGIC + 1)),
        "not yet begun": bytes(SIZE),
        "a phase that nobody knows": with_word(heartbeat._NOW, struct.pack("Q", len(Phase))),
        "noise": struct.pack("Q", MAGIC) + b"\xff" * (SIZE - 8),
    }
    for what, data in foreign.items():
        path.write_bytes(data)
        assert read_heartbeat(path) is None, what
    path.write_bytes(whole)
    assert read_heartbeat(path) is not None
    assert read_heartbeat(tmp_path) is None, "a folder"


WRITES_WITHOUT_A_PAUSE = """
import sys
from pathlib import Path
from drumline.watch.heartbeat import Phase
from drumline.watch.heartbeat import HeartbeatWriter
writer, step = HeartbeatWriter(Path(sys.argv[1])), 0
print(flush=True)
while True:
    step += 1
    writer.begin_step(step)
    for phase in (Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER):
        writer.mark(phase)
"""


def test_a_reader_is_never_misled_by_a_rank_that_marks_without_a_pause(tmp_path: Path) -> None:
    path = tmp_path / "heartbeat"
    with subprocess.Popen(
        [sys.executable, "-c", WRITES_WITHOUT_A_PAUSE, str(path)], stdout=subprocess.PIPE
    ) as rank:
        try:
            assert rank.stdout is not None
            rank.stdout.readline()
            beats = [beat_of(path) for _ in range(3000)]
            now = time.monotonic()
        finally:
            rank.kill()
    for before, after in pairwise(beats):
        assert after.num_marks >= before.num_marks
        assert after.step >= before.step
    assert beats[-1].num_marks > 1000
    assert {beat.phase for beat in beats} <= {
        Phase.START,
        Phase.DATA,
        Phase.FORWARD,
        Phase.BACKWARD,
        Phase.OPTIMIZER,
    }
    assert now - beats[-1].entered_at < 5


def test_a_rank_that_is_not_watched_writes_to_memory_alone() -> None:
    writer = HeartbeatWriter()
    writer.begin_step(1)
    writer.mark(Phase.DATA)
    writer.fail("nobody hears this")


def test_a_record_is_never_written_over(tmp_path: Path) -> None:
    HeartbeatWriter(tmp_path / "heartbeat")
    with pytest.raises(FileExistsError):
        HeartbeatWriter(tmp_path / "heartbeat")


FORK = """
import os, sys
from pathlib import Path
from drumline.watch.heartbeat import Phase
from drumline.watch.heartbeat import HeartbeatWriter
writer = HeartbeatWriter(Path(sys.argv[1]))
writer.mark(Phase.USER)
if os.fork() == 0:
    writer.begin_step(7)
    writer.mark(Phase.LEFT)
    writer.fail("ValueError: of the fork")
    os._exit(0)
os.wait()
writer.begin_step(3)
"""


def test_a_forked_child_does_not_write_the_ranks_heartbeat(tmp_path: Path) -> None:
    path = tmp_path / "heartbeat"
    subprocess.run([sys.executable, "-c", FORK, str(path)], check=True)
    beat = beat_of(path)
    assert (beat.phase, beat.step, beat.num_marks, beat.failure) == (Phase.USER, 3, 1, "")


def test_a_record_has_its_memory_from_the_start(tmp_path: Path) -> None:
    """A store to a page that cannot be had any more would be the end of the rank."""
    heartbeat._make_file(tmp_path / "heartbeat").close()
    assert (tmp_path / "heartbeat").stat().st_blocks > 0
    assert (tmp_path / "heartbeat").stat().st_size == SIZE


def test_a_record_has_how_long_the_last_steps_took(tmp_path: Path) -> None:
    path = tmp_path / "rank-00000.heartbeat"
    writer = HeartbeatWriter(path)
    begins_s = []
    for step in range(heartbeat.KEPT_STEPS + 10):
        begins_s.append(time.monotonic())
        writer.begin_step(step)
    record = beat_of(path)
    times = dict(record.step_s(0))
    last = heartbeat.KEPT_STEPS + 9
    assert list(times) == list(range(10, last)), "older ones are overwritten"
    assert sum(times.values()) == pytest.approx(begins_s[last] - begins_s[10], abs=1e-3)
    assert [step for step, _ in record.step_s(last - 3)] == [last - 3, last - 2, last - 1]


def test_an_evaluation_or_a_save_is_no_part_of_a_step(tmp_path: Path) -> None:
    path = tmp_path / "rank-00000.heartbeat"
    writer = HeartbeatWriter(path)
    writer.begin_step(0)
    begin_s = time.monotonic()
    for phase in (Phase.EVALUATION, Phase.SAVE):
        writer.mark(phase)
        time.sleep(0.05)
    writer.mark(Phase.DATA)
    writer.begin_step(1)
    took_s = time.monotonic() - begin_s
    ((step, seconds),) = beat_of(path).step_s(0)
    assert step == 0
    assert seconds < took_s - 0.09
