"""A ledger of any history replays to what was trained; one that was tampered with does not."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from drumline.data.sharding import Cursor, Ledger, Sharding, permute, plan_step
from drumline.report.verify.checkpoint_check import SavedPosition
from drumline.report.verify.samples import check_samples
from drumline.report.verify.section import Section


@dataclass
class Job:
    """Takes steps like the engine, on as many pretended ranks as it is started with."""

    length: int
    batch_size: int
    streams: bool = False
    lines: list[dict[str, Any]] = field(default_factory=list)
    saved: list[tuple[int, Cursor]] = field(default_factory=lambda: [(0, Cursor())])
    seen: dict[int, list[tuple[int, list[int]]]] = field(default_factory=dict)
    """By step: the epoch, and the positions that its ranks had."""

    def attempt(
        self,
        world_size: int,
        steps: int,
        *,
        save_every: int = 2,
        writes_checkpoints: bool = True,
        **start: Any,
    ) -> None:
        since, cursor = self.saved[-1]
        self.seen = {number: seen for number, seen in self.seen.items() if number <= since}
        samples = None if self.streams else self.length
        self.lines.append({
            "kind": "start", "step": since, "epoch": cursor.epoch, "position": cursor.position,
            "world_size": world_size, "batch_size": self.batch_size, "samples": samples, "seed": 3, **start,
        })  # fmt: skip
        sharings = [
            Sharding(batch_size=self.batch_size, rank=rank, world_size=world_size)
            for rank in range(world_size)
        ]
        ledgers = [Ledger() for _ in range(world_size)]
        for step in range(since + 1, since + steps + 1):
            plans = [
                plan_step(cursor, length=self.length, sharding=sharding) for sharding in sharings
            ]
            for ledger, plan in zip(ledgers, plans, strict=True):
                ledger.add(plan)
            self.seen[step] = [(plan.epoch, list(range(*plan.local_range))) for plan in plans]
            cursor = plans[0].next_cursor
            if step % save_every == 0:
                ranks = [[list(entry) for entry in ledger.take()] for ledger in ledgers]
                self.lines.append(
                    {"kind": "steps", "first": since + 1, "last": step, "ranks": ranks}
                )
                since = step
                if writes_checkpoints:
                    self.saved.append((step, cursor))
        self.seen = {number: seen for number, seen in self.seen.items() if number <= since}

    def check(self, folder: Path) -> Section:
        path = folder / "ledger.jsonl"
        part = Section("samples")
        path.write_text("".join(json.dumps(line) + "\n" for line in self.lines))
        saved = [
            SavedPosition(step, cursor.epoch, cursor.position) for step, cursor in self.saved[1:]
        ]
        check_samples(path, part, saved)
        return part

    def texts(self, folder: Path) -> list[str]:
        return [str(problem) for problem in self.check(folder).problems]


def stretches(job: Job) -> list[dict[str, Any]]:
    return [line for line in job.lines if line["kind"] == "steps"]


def two_epochs(world_size: int = 2) -> Job:
    """37 samples in batches of 8, saved after every second step: 5 steps an epoch, the last of 5
    samples."""
    job = Job(37, 8)
    job.attempt(world_size, 10)
    return job


@st.composite
def histories(draw: st.DrawFn) -> Job:
    job = Job(draw(st.integers(1, 50)), draw(st.integers(4, 12)), streams=draw(st.booleans()))
    for _ in range(draw(st.integers(1, 5))):
        job.attempt(
            draw(st.integers(1, 4)),
            draw(st.integers(0, 14)),
            save_every=draw(st.integers(1, 4)),
            writes_checkpoints=draw(st.booleans()),
        )
    return job


any_history = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@any_history
@given(job=histories())
def test_any_history_of_kills_and_world_sizes_replays_to_the_truth(
    job: Job, tmp_path: Path
) -> None:
    part = job.check(tmp_path)
    assert part.problems == []
    assert part.counts["steps"] == max(job.seen, default=job.saved[-1][0])
    covered = sum(len(positions) for ranks in job.seen.values() for _, positions in ranks)
    assert part.counts["positions"] == covered


@any_history
@given(job=histories(), data=st.data())
def test_a_share_that_is_changed_is_found(job: Job, data: st.DataObject, tmp_path: Path) -> None:
    last_start = max(number for number, line in enumerate(job.lines) if line["kind"] == "start")
    counting = [line for line in job.lines[last_start:] if line["kind"] == "steps"]
    if not counting:
        return
    runs = data.draw(st.sampled_from(data.draw(st.sampled_from(counting))["ranks"]))
    run = data.draw(st.sampled_from(runs))
    which = data.draw(st.sampled_from([0, 1, 2, 3, 4]))
    run[which] += data.draw(st.sampled_from([-1, 1]))
    assert job.check(tmp_path).problems


@any_history
@given(job=histories(), data=st.data())
def test_a_line_that_is_lost_or_doubled_is_found(
    job: Job, data: st.DataObject, tmp_path: Path
) -> None:
    last_start = max(number for number, line in enumerate(job.lines) if line["kind"] == "start")
    counting = range(last_start + 1, len(job.lines))
    if not counting:
        return
    number = data.draw(st.sampled_from(list(counting)))
    if data.draw(st.booleans()):
        job.lines.insert(number, job.lines[number])
        assert job.check(tmp_path).problems
    elif number < counting[-1]:
        del job.lines[number]
        assert job.check(tmp_path).problems


def test_a_sample_that_two_ranks_had_is_named(tmp_path: Path) -> None:
    job = two_epochs()
    stretches(job)[0]["ranks"][0][0][2] += 1  # rank 0 has one more in steps 1 and 2
    assert job.texts(tmp_path) == [
        "ledger.jsonl, line 2: step 1: the ranks' samples are not one global batch: "
        "rank 0 had 5 from position 0 of epoch 1; rank 1 had 4 from position 4 of epoch 1"
    ]


def test_samples_that_never_came_are_named(tmp_path: Path) -> None:
    job = two_epochs()
    del job.lines[2]
    samples = ", ".join(map(str, permute(np.arange(16, 21), length=37, seed=3, epoch=0).tolist()))
    assert job.texts(tmp_path) == [
        "ledger.jsonl, line 3: not recorded above it: steps 3 to 4",
        f"ledger.jsonl: epoch 1: positions 16 to 31 (samples {samples} and 11 more) missing: "
        "step 2 ended there, then step 5",
    ]


def test_steps_recorded_twice_are_named(tmp_path: Path) -> None:
    job = two_epochs(3)
    job.lines.insert(2, job.lines[1])
    texts = job.texts(tmp_path)
    assert texts[0] == "ledger.jsonl, line 3: recorded twice: steps 1 to 2"
    assert "positions 0 to 15 (samples" in texts[1]
    assert texts[1].endswith(
        "covered twice: in steps 1 to 2 on ranks 0-2, and in steps 1 to 2 on ranks 0-2"
    )


def test_many_faults_are_summed_up(tmp_path: Path) -> None:
    job = Job(4000, 8)
    job.attempt(2, 500, save_every=1)
    del job.lines[2::2]
    texts = [text for text in job.texts(tmp_path) if "missing" in text]
    assert len(texts) == 6
    assert "epoch 1: 1,952 more positions missing, the last at 3,983" in texts[-1]


def test_whole_epochs_that_are_lost_are_named(tmp_path: Path) -> None:
    job = Job(16, 8)
    job.attempt(2, 6)
    del job.lines[2]
    assert "ledger.jsonl: epoch 2 missing" in job.texts(tmp_path)
    del job.lines[1]
    assert "ledger.jsonl: epochs 1 to 2 missing" in job.texts(tmp_path)


def test_steps_in_the_wrong_order_are_named(tmp_path: Path) -> None:
    job = two_epochs()
    first, second = stretches(job)[:2]
    first["ranks"], second["ranks"] = second["ranks"], first["ranks"]
    assert (
        "ledger.jsonl, line 3: step 3 began at position 0 of epoch 1, but step 2 ended at 32"
        in job.texts(tmp_path)
    )


def test_shares_of_another_step_are_named(tmp_path: Path) -> None:
    job = two_epochs()
    left = stretches(job)[0]["ranks"][0]
    right = stretches(job)[1]["ranks"][0]
    left[:], right[:] = list(right), list(left)
    text = "ledger.jsonl, line 2: step 1: the ranks' samples are not one global batch"
    assert any(found.startswith(text) for found in job.texts(tmp_path))


def test_a_batch_of_another_size_is_named(tmp_path: Path) -> None:
    job = two_epochs()
    job.lines[0]["batch_size"] = 9
    assert "ledger.jsonl, line 2: step 1 had a global batch of 8, not of 9" in job.texts(tmp_path)


def test_a_step_without_samples_is_named(tmp_path: Path) -> None:
    job = Job(4, 4)
    job.attempt(1, 2)
    job.lines[1]["ranks"][0][0][2] = 0
    text = "ledger.jsonl, line 2: step 1: the ranks' samples are not one global batch"
    assert any(found.startswith(text) for found in job.texts(tmp_path))


def test_a_position_that_no_dataset_has_is_named(tmp_path: Path) -> None:
    job = two_epochs()
    for line in job.lines:
        if line["kind"] == "start":
            line["samples"] = 36
    assert any(
        text.endswith("epoch 1 reaches position 36, but there are 36 samples")
        for text in job.texts(tmp_path)
    )


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"kind": "leap"}, "its kind is 'leap', which this version of Drumline does not know"),
        ({"first": -1}, "damaged: Expected `int` >= 0 - at `$.first`"),
        ({"last": 3}, "damaged: steps 1 to 3, but rank 0 has 2"),
        ({"ranks": []}, "damaged: Expected `array` of length >= 1 - at `$.ranks`"),
        ({"ranks": [[[0, 0, 8, 8]]]}, "damaged: [0, 0, 8, 8] is not a ledger entry"),
        ({"ranks": [[[0, 0, 8, 8, 2]]]}, "1 ranks, but the job had 2"),
    ],
)
def test_damaged_lines_are_named(tmp_path: Path, damage: dict[str, Any], message: str) -> None:
    job = two_epochs()
    job.lines[1].update(damage)
    assert f"ledger.jsonl, line 2: {message}" in job.texts(tmp_path)


def test_a_ledger_without_its_start_is_reported(tmp_path: Path) -> None:
    job = two_epochs()
    del job.lines[0]
    texts = job.texts(tmp_path)
    assert texts[0] == "ledger.jsonl, line 1: steps, but no start of a job above them"
    assert (
        texts[-1]
        == "ledger.jsonl: has no start of a job, but there are 5 checkpoints of steps 2 to 10"
    )


def test_an_empty_ledger_is_one_problem(tmp_path: Path) -> None:
    job = two_epochs()
    job.lines.clear()
    assert job.texts(tmp_path) == [
        "ledger.jsonl: has no start of a job, but there are 5 checkpoints of steps 2 to 10"
    ]


@pytest.mark.parametrize(
    ("samples", "what"),
    [
        (36, "epoch 1 reaches position 36, but there are 36 samples"),
        (40, "epoch 1: positions 37 to 39"),
    ],
)
def test_a_wrong_number_of_samples_is_reported(tmp_path: Path, samples: int, what: str) -> None:
    job = Job(37, 8)
    job.attempt(2, 60)
    job.lines[0]["samples"] = samples
    assert what in job.texts(tmp_path)[0]


def test_a_start_from_a_step_that_was_not_reached_is_named(tmp_path: Path) -> None:
    job = two_epochs()
    job.lines[3:] = []
    job.attempt(3, 5)
    assert job.texts(tmp_path)[0] == (
        "ledger.jsonl, line 4: the run resumed from step 10; not recorded: steps 5 to 10"
    )


def test_a_checkpoint_at_another_position_is_named(tmp_path: Path) -> None:
    job = two_epochs()
    job.saved[2] = (4, Cursor(0, 31))
    assert job.texts(tmp_path) == [
        "ledger.jsonl: the checkpoint of step 4 is at position 31 of epoch 1, but the ledger at 32 of 1"
    ]


def test_an_order_that_changes_within_an_epoch_is_reported(tmp_path: Path) -> None:
    job = Job(37, 8)
    job.attempt(2, 2)
    job.length = 40
    job.attempt(2, 4, seed=4)
    part = job.check(tmp_path)
    changed = "ledger.jsonl, line 3: the order of epoch 1 changed, so samples may be missing or repeated: "
    assert list(map(str, part.problems)) == [
        f"{changed}37 samples, seed 3 before step 3, 40 samples, seed 4 after"
    ]


def test_a_dataset_that_changes_between_epochs_is_a_note(tmp_path: Path) -> None:
    job = Job(32, 8)
    job.attempt(2, 4)
    job.length = 40
    job.attempt(2, 5, save_every=3)
    part = job.check(tmp_path)
    assert part.problems == []
    assert "the dataset changed: 32 samples before step 5, 40 samples after" in str(part.notes[0])


def test_an_incomplete_line_is_a_note(tmp_path: Path) -> None:
    job = Job(37, 8)
    job.attempt(3, 4)
    path = tmp_path / "ledger.jsonl"
    part = Section("samples")
    text = "".join(json.dumps(line) + "\n" for line in job.lines)
    path.write_text(text + text.splitlines()[-1][:30])
    check_samples(path, part, [SavedPosition(4, 0, 32)])
    assert part.problems == []
    assert [str(note) for note in part.notes] == [
        "ledger.jsonl, line 4: incomplete: cut off by a kill or a full disk"
    ]


def test_a_ledger_that_lacks_its_beginning_is_reported(tmp_path: Path) -> None:
    job = Job(37, 8)
    job.attempt(2, 4)
    job.lines.clear()
    job.attempt(3, 4)
    resumed, missing = job.texts(tmp_path)[:2]
    assert (
        resumed == "ledger.jsonl, line 1: the run resumed from step 4; not recorded: steps 1 to 4"
    )
    assert missing.startswith("ledger.jsonl: epoch 1: positions 0 to 31 (samples ")


def test_a_stream_says_that_its_length_is_not_known(tmp_path: Path) -> None:
    job = Job(37, 8, streams=True)
    job.attempt(3, 8)
    part = job.check(tmp_path)
    assert part.problems == []
    assert part.summary == (
        "1 epoch of a stream of unknown length, 24 of epoch 2 so far, each exactly once; 8 steps in 1 start on 3 ranks"
    )


def test_a_year_on_many_ranks_is_replayed_at_once(tmp_path: Path) -> None:
    """A million steps on 64 ranks: as many pieces as there are runs, not steps."""
    runs = [[[0, rank * 4, rank * 4 + 4, 256, 10**6]] for rank in range(64)]
    job = Job(256 * 10**6, 256)
    job.lines = [
        {"kind": "start", "step": 0, "epoch": 0, "position": 0, "world_size": 64, "batch_size": 256,
         "samples": 256 * 10**6, "seed": 0},
        {"kind": "steps", "first": 1, "last": 10**6, "ranks": runs},
    ]  # fmt: skip
    part = job.check(tmp_path)
    assert part.problems == []
    assert part.counts["positions"] == 256 * 10**6


def test_no_ledger_and_one_that_cannot_be_read(tmp_path: Path) -> None:
    part = Section("samples")
    assert check_samples(tmp_path / "ledger.jsonl", part, []) is None
    assert (part.summary, part.problems) == ("not recorded", [])
    assert check_samples(tmp_path, part, []) is None
    assert [str(problem) for problem in part.problems] == [
        "ledger.jsonl: cannot be read: Is a directory"
    ]


def test_samples_that_were_lost_with_a_node_are_counted(tmp_path: Path) -> None:
    job = Job(37, 8)
    job.attempt(2, 4)
    job.lines[-1]["unsaved"] = True
    job.attempt(1, 6, lost=[[1, 3, 4]])
    part = job.check(tmp_path)
    assert part.problems == []
    assert [str(note) for note in part.notes] == [
        "ledger.jsonl, line 4: 8 samples of steps 3 to 4 were lost with rank 1, which the others continued without"
    ]
    assert (
        ", each exactly once but for 8 samples lost with a node; 10 steps in 2 starts"
        in part.summary
    )
    job.lines[3]["lost"] = [[1, 4]]
    assert job.texts(tmp_path)[0].startswith(
        "ledger.jsonl, line 4: damaged: Expected `array` of length 3"
    )
