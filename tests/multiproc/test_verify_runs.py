"""A run that was killed twice and resumed on other numbers of ranks has no problems; any damage is
named."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from drumline.config.schema import CheckpointConfig, Config
from drumline.report.verify.run_check import RunReport, verify_run
from drumline.runs.run_folder import RunFolder, locked
from drumline.training.between_steps.saver import Saver
from drumline.training.job.job import Progress
from tests.jobs import Classify, make_config, train_here, train_on
from tests.ranks import RanksFailed, run_ranks

CONFIG = make_config(
    checkpoint=CheckpointConfig(every_steps=2, every_epochs=0, keep_last=50, keep_best=0)
)


def die_at(step: int, when: str, config: Config, run: Path) -> None:
    """Train, and end with -9 just before or after the save of a step, on every rank."""
    save = Saver.save

    def save_and_die(self: Saver, progress: Progress, metrics: Mapping[str, float]) -> None:
        if when == "after" or progress.step < step:
            save(self, progress, metrics)
        else:
            self._ledger_file.gather(progress)
        if progress.step == step:
            self.writer.wait()
            self._job.ddp.barrier()
            os.kill(os.getpid(), signal.SIGKILL)

    Saver.save = save_and_die  # type: ignore[method-assign]
    train_here(config, Classify, run)


@pytest.fixture(scope="module", name="trained")
def train_through_kills(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """10 steps: 3 ranks, killed after the ledger of step 4 but before its checkpoint; 2 ranks,
    killed after the save of step 6; then alone to the end."""
    run = tmp_path_factory.mktemp("verify") / "run"
    for world_size, step, when in ((3, 4, "before"), (2, 6, "after")):
        with pytest.raises(RanksFailed):
            run_ranks(world_size, die_at, step, when, CONFIG, run)
    assert train_on(1, CONFIG, Classify, run).step == 10
    return run


@pytest.fixture(name="run")
def copy_run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


def verify(run: Path) -> RunReport:
    return verify_run(run, lambda text: None)


def lines_of(path: Path) -> list[str]:
    return path.read_text().splitlines(keepends=True)


def test_the_run_has_no_problems(run: Path) -> None:
    report = verify(run)
    assert [str(problem) for problem in report.problems] == []
    checkpoints, samples, events, settings = report.sections
    assert checkpoints.summary.startswith("5 of 5 complete (step 2 ... 10), ")
    assert samples.summary == (
        "2 epochs of 37 samples, each exactly once; 10 steps in 3 starts on 3, 2 and 1 ranks"
    )
    assert events.counts["ranks"] == 3
    assert events.counts["attempts"] == 3
    assert settings.counts == {"readable": 2}
    assert report.last_valid_step == 10
    assert report.job_at_work is None


def test_a_run_of_one_rank_that_ends_in_the_middle_of_an_epoch_has_no_problems(
    tmp_path: Path,
) -> None:
    train_here(make_config(steps=7), Classify, tmp_path)
    report = verify(tmp_path)
    assert report.problems == []
    assert report.sections[1].summary == (
        "1 epoch of 37 samples, 16 of epoch 2 so far, each exactly once; 7 steps in 1 start on 1 rank"
    )


def flip_a_byte(run: Path) -> None:
    file = run / "checkpoints" / "step-00000004" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)


def change_lines(name: str, change: Callable[[list[str]], object]) -> Callable[[Path], None]:
    def damage(run: Path) -> None:
        lines = lines_of(run / name)
        change(lines)
        (run / name).write_text("".join(lines))

    return damage


def change_ranges(line: int, rank: int, number: int, by: int) -> Callable[[Path], None]:
    def change(lines: list[str]) -> None:
        record = json.loads(lines[line])
        record["ranks"][rank][0][number] += by
        lines[line] = json.dumps(record) + "\n"

    return change_lines("ledger.jsonl", change)


LEDGER = "ledger.jsonl"
EVENTS = "events/rank-00001.jsonl"


# The ledger: 1 start, 2 steps 1-2, 3 steps 3-4 (void), 4 start, 5 steps 3-4, 6 steps 5-6, 7 start,
# 8 to 9 the rest.
@pytest.mark.parametrize(
    ("damage", "messages"),
    [
        (
            flip_a_byte,
            [
                "checkpoints/step-00000004: corrupt or incomplete: model.safetensors: its checksum differs from "
                "the manifest's"
            ],
        ),
        (
            change_lines(LEDGER, lambda lines: lines.pop(4)),
            ["ledger.jsonl, line 5: not recorded above it: steps 3 to 4", "epoch 1: positions 16 to 31 (samples "],
        ),
        (
            change_lines(LEDGER, lambda lines: lines.insert(5, lines[4])),
            ["ledger.jsonl, line 6: recorded twice: steps 3 to 4", "covered twice: in steps 3 to 4 on ranks 0, 1, and"],
        ),
        (change_lines(LEDGER, lambda lines: lines.pop()), ["ledger.jsonl: ends at step 8, but there is a checkpoint"]),
        (change_lines(LEDGER, lambda lines: lines.pop(3)), ["ledger.jsonl, line 4: 2 ranks, but the job had 3"]),
        (
            change_lines(LEDGER, lambda lines: lines.__setitem__(5, lines[5][:40] + "\n")),
            ["ledger.jsonl, line 7: the run resumed from step 6; not recorded: steps 5 to 6"],
        ),
        (change_ranges(4, 0, 2, +1), ["step 3: the ranks' samples are not one global batch: rank 0 had 5"]),
        (change_ranges(4, 1, 1, +1), ["rank 1 had 3 from position 21 of epoch 1"]),
        (change_lines(EVENTS, lambda lines: lines.pop(1)), [f"{EVENTS}, line 2: 1 event missing above it"]),
        (
            change_lines(EVENTS, lambda lines: lines.__setitem__(1, lines[1][:30] + "\n")),
            [f"{EVENTS}, line 2: unreadable; an event is lost"],
        ),
        (lambda run: (run / EVENTS).unlink(), [f"{EVENTS}: is missing: the run had 3 ranks"]),
        (lambda run: (run / LEDGER).unlink(), ["ledger.jsonl: is missing, though the run has taken steps"]),
        (
            lambda run: shutil.rmtree(run / "checkpoints"),
            ["checkpoints/step-00000010: is missing, though the run saved it (events/rank-00000.jsonl, line "],
        ),
        (
            lambda run: shutil.rmtree(run / "checkpoints/step-00000010"),
            ["checkpoints/step-00000010: is missing, though the run saved it (events/rank-00000.jsonl, line "],
        ),
        (
            lambda run: [shutil.rmtree(run / "checkpoints"), (run / LEDGER).unlink()],
            ["checkpoints/step-00000010: is missing", "ledger.jsonl: is missing, though the run has taken steps"],
        ),
        (lambda run: (run / "config.toml").write_text("a = "), ["config.toml: is damaged: "]),
        (lambda run: (run / "config.toml").unlink(), ["config.toml: is missing"]),
        (lambda run: (run / "environment.json").write_text("[]"), ["environment.json: is damaged: it is not a table"]),
        (lambda run: (run / "environment.json").write_text("{}"), ["environment.json: does not list the ranks"]),
    ],
)  # fmt: skip
def test_what_is_damaged_is_named(
    run: Path, damage: Callable[[Path], None], messages: list[str]
) -> None:
    damage(run)
    text = "\n".join(str(problem) for problem in verify(run).problems)
    for message in messages:
        assert message in text


def test_an_incomplete_end_of_the_ledger_is_a_note_and_the_run_resumes_from_it(run: Path) -> None:
    with (run / LEDGER).open("a") as file:
        file.write('{"kind":"steps","fir')
    assert [str(note) for note in verify(run).notes] == [
        "ledger.jsonl, line 10: incomplete: cut off by a kill or a full disk"
    ]
    train_here(make_config(epochs=3), Classify, run)
    report = verify(run)
    assert report.problems == []
    assert report.sections[1].summary.startswith(
        "3 epochs of 37 samples, each exactly once; 15 steps in 4 starts"
    )


def test_checkpoints_that_are_gone_are_not_called_none_yet(run: Path) -> None:
    shutil.rmtree(run / "checkpoints" / "step-00000010")
    assert verify(run).sections[0].summary.startswith("4 of 4 complete (step 2, 4, 6, 8), ")
    assert verify(run).sections[0].summary.endswith("; the newest is missing")
    shutil.rmtree(run / "checkpoints")
    assert verify(run).sections[0].summary == "none is left"


def test_a_checkpoint_set_aside_by_a_save_that_was_killed_is_not_missed(run: Path) -> None:
    (run / "checkpoints/step-00000010").rename(run / "checkpoints/.step-00000010.replaced")
    assert verify(run).problems == []


def test_what_else_lies_in_a_checkpoint_is_a_note(run: Path) -> None:
    (run / "checkpoints/step-00000004/notes.txt").write_text("mine")
    report = verify(run)
    assert report.problems == []
    assert [str(note) for note in report.notes] == [
        "checkpoints/step-00000004: has files that are not in its manifest: notes.txt"
    ]


@pytest.mark.parametrize(
    "content",
    ["", '{"number":0,"kind":"note","step":0}\n', '{"number":0,"kind":"error","step":0}\n'],
)
def test_a_run_that_was_killed_before_it_began_has_no_problems(
    tmp_path: Path, content: str
) -> None:
    RunFolder(tmp_path).make()
    RunFolder(tmp_path).event_file(0).write_text(content)
    report = verify(tmp_path)
    assert report.problems == []
    assert [note.what for note in report.notes if note.part == "settings"] == [
        "is not written: a job is starting, or was ended before its first step"
    ] * 2
    with locked(RunFolder(tmp_path)):
        (report,) = run_ranks(1, verify, tmp_path)
    assert report.problems == []
    assert (
        "config.toml: is not written: a job is starting, or was ended before its first step"
        in map(str, report.notes)
    )


def test_what_a_killed_save_leaves_is_a_note(run: Path) -> None:
    (run / "checkpoints" / ".step-00000012.partial").mkdir()
    report = verify(run)
    assert report.problems == []
    assert "step-00000012.partial: left by a save that did not finish" in str(report.notes[0])


def test_a_checkpoint_that_does_not_say_its_position_is_named(run: Path) -> None:
    from drumline.checkpoint import store

    store.write(
        run / "checkpoints", 10, tensors={}, documents={"progress": {"step": 10}}, metrics={}
    )
    store.write(
        run / "checkpoints",
        8,
        tensors={},
        documents={"progress": {"step": 7, "cursor": {"epoch": 1, "position": 16}}},
        metrics={},
    )
    assert [str(problem) for problem in verify(run).problems] == [
        "checkpoints/step-00000008/progress.json: belongs to step 7",
        "checkpoints/step-00000010/progress.json: has no valid step and position",
    ]


def test_a_run_at_work_is_reported(run: Path) -> None:
    with locked(RunFolder(run)):
        (report,) = run_ranks(1, verify, run)
    assert report.job_at_work == f"process {os.getpid()} on {os.uname().nodename}"
    assert report.problems == []
