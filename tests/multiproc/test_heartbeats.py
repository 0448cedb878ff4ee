"""The beats of a run, as another process sees them while the run is in each phase; and those of a
user's own loop."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader, Dataset, IterableDataset

from drumline.base.errors import ExitCode
from drumline.config.schema import Config, WatchConfig
from drumline.data.loader import IndexedLoader
from drumline.rank.collectives import collective_counter
from drumline.rank.watched.progress_monitor import ProgressMonitor, num_collectives
from drumline.runs.events import read_events
from drumline.training.job.job import Progress, make_manager
from drumline.training.manager import RunManager
from drumline.training.run import TrainingRun
from drumline.training.run_context import RunRequest
from drumline.training.tasks.base import Loss
from drumline.watch.heartbeat import Heartbeat, HeartbeatWriter, Phase, read_heartbeat
from tests.jobs import Classify, Points, make_config
from tests.ranks import run_ranks

# Beats go to a file of the test's own here; a sidecar would see ranks that end without a word.
NO_SIDECAR = WatchConfig(sidecar="off")
LOOKS = """
import json, sys
from pathlib import Path
from drumline.watch.heartbeat import read_heartbeat
for _ in sys.stdin:
    one = read_heartbeat(Path(sys.argv[1]))
    print(json.dumps([one.phase.name, one.step, one.micro, one.num_marks, one.collective, one.failure]), flush=True)
"""


class Onlooker:
    """Another process, which says what it sees of a rank when it is asked; and what it has seen, by
    place."""

    current: Onlooker

    def __init__(self, path: Path) -> None:
        self.path = path
        self.seen: dict[str, list[tuple[str, int, int]]] = {}
        self.num_marks: list[int] = []
        self._process = subprocess.Popen(
            [sys.executable, "-c", LOOKS, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self) -> list[Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        document: list[Any] = json.loads(self._process.stdout.readline())
        return document

    def look(self, place: str) -> None:
        phase, step, micro, beats, *_ = self.ask()
        self.seen.setdefault(place, []).append((phase, step, micro))
        self.num_marks.append(beats)

    def phases(self, place: str) -> set[str]:
        return {phase for phase, *_ in self.seen[place]}

    def close(self) -> None:
        self._process.communicate()


@contextmanager
def watched(ddp: RunManager, folder: Path) -> Iterator[Onlooker]:
    """The rank's beats go to a file, and someone looks at it."""
    path = folder / f"rank-{ddp.rank:05d}.heartbeat"
    ddp.connection.heartbeat = HeartbeatWriter(path, rank=ddp.rank)
    onlooker = Onlooker.current = Onlooker(path)
    try:
        yield onlooker
    finally:
        onlooker.close()


def look(place: str) -> None:
    Onlooker.current.look(place)


class LookedAt(Points):
    def __init__(self, length: int, place: str) -> None:
        super().__init__(length)
        self.place = place

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        look(self.place)
        return super().__getitem__(index)


class LookAround(Classify):
    """Has someone look at the beats wherever a task's own code runs."""

    def model(self) -> nn.Module:
        look("model")
        model = super().model()
        model.register_state_dict_pre_hook(lambda *_: look("state"))
        return model

    def train_data(self) -> Dataset[Any]:
        return LookedAt(self.config.data.samples, "data")

    def eval_data(self) -> Dataset[Any]:
        return LookedAt(7, "evaluation data")

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        loss = super().loss(model, batch)
        look("loss" if torch.is_grad_enabled() else "evaluation loss")
        if loss.total.requires_grad:
            loss.total.register_hook(lambda _: look("gradient"))
        return loss

    def report(self, means: dict[str, float]) -> dict[str, float]:
        look("report")
        return means


class FailsInTheMiddle(LookAround):
    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        if Onlooker.current.ask()[1] == 3:
            raise ValueError("no such label\nin this batch")
        return super().loss(model, batch)


def train_watched(config: Config, run: Path) -> dict[str, Any]:
    ddp = make_manager(config)
    ddp.setup()
    optimizer_hook = register_optimizer_step_pre_hook(lambda *_: look("optimizer"))
    with watched(ddp, run.parent) as onlooker:
        # The first comparison of data reads samples too: before the first step.
        code = TrainingRun(
            RunRequest("test", config, run, False, ("test",)), LookAround, ddp, Progress()
        ).train()
        onlooker.look("after the loop")
        collectives = onlooker.ask()[4]
        begun = collective_counter()()
        ddp.cleanup()
        onlooker.look("after the end")
    optimizer_hook.remove()
    assert code == ExitCode.SUCCESS
    places = {place: sorted(onlooker.phases(place)) for place in onlooker.seen}
    return {
        "places": places,
        "loss": onlooker.seen["loss"],
        "moves": onlooker.num_marks == sorted(onlooker.num_marks),
        "collectives": (collectives, begun),
    }


@pytest.mark.parametrize("exact", ["same_world", "elastic"])
def test_every_phase_of_a_run_is_seen_from_outside(tmp_path: Path, exact: str) -> None:
    shards = {"exact": "elastic", "shards": 2} if exact == "elastic" else {}
    config = replace(make_config(samples=16, epochs=2, accumulate=2, **shards), watch=NO_SIDECAR)
    for rank, facts in enumerate(run_ranks(2, train_watched, config, tmp_path / "run")):
        places = facts["places"]
        assert places["model"] == ["START"]
        assert places["data"] == ["DATA", "START"], (
            "START: samples are compared before the first step"
        )
        assert places["loss"] == ["FORWARD", "START"], (
            "START: the loss is checked before the first step"
        )
        assert places["gradient"] == ["BACKWARD", "START"], (
            "START: operations are counted before the first step"
        )
        assert places["optimizer"] == ["OPTIMIZER"]
        assert places["report"] == ["BETWEEN", "EVALUATION"]
        assert places["evaluation loss"] == ["EVALUATION"]
        assert places["evaluation data"] == ["EVALUATION", "START"]
        if rank == 0:
            assert "SAVE" in places["state"]
        assert (places["after the loop"], places["after the end"]) == (["LEAVING"], ["LEFT"])
        # Two epochs of two steps, each of two micro-batches.
        in_steps = [seen for seen in facts["loss"] if seen[0] != "START"]
        assert in_steps == [("FORWARD", step, micro) for step in range(4) for micro in (1, 2)]
        assert facts["moves"]
        counted, begun = facts["collectives"]
        assert 0 < counted <= begun
        check_phases(tmp_path / "run" / "events" / f"rank-{rank:05d}.jsonl")


def check_phases(events: Path) -> None:
    """With each log line a rank reports what its time went to since the last one."""
    found = [event for event in read_events(events) if event["kind"] in ("train", "phases")]
    lines, phases = (
        [event for event in found if event["kind"] == kind] for kind in ("train", "phases")
    )
    assert [event["step"] for event in phases] == [event["step"] for event in lines] == [2, 4]
    first, second = (event["phases_s"] for event in phases)
    assert {"start", "data", "forward", "backward", "optimizer"} <= first.keys()
    assert {"data", "forward", "backward", "optimizer", "evaluation", "save"} <= second.keys()
    assert "start" not in second
    assert 0 < sum(second.values()) <= phases[1]["time"] - phases[0]["time"] + 0.1


def fail_watched(config: Config, run: Path) -> tuple[list[Any], list[list[str]]]:
    """What the onlooker sees in the end, and what it saw on the way."""
    close = IndexedLoader.close

    def looked_at_close(loader: IndexedLoader) -> None:
        look("close")
        close(loader)

    IndexedLoader.close = looked_at_close  # type: ignore[method-assign]  # the process is this test's own
    ddp = make_manager(config)
    ddp.setup()
    with watched(ddp, run.parent) as onlooker:
        with pytest.raises(ValueError, match="no such label"):
            TrainingRun(
                RunRequest("test", config, run, False, ("test",)), FailsInTheMiddle, ddp, Progress()
            ).train()
        ddp.cleanup()
        return onlooker.ask(), [sorted(onlooker.phases(place)) for place in ("loss", "close")]


def test_a_failure_is_in_the_record_before_anything_is_closed(tmp_path: Path) -> None:
    ((phase, step, *_, failure), phases) = run_ranks(
        1, fail_watched, make_config(), tmp_path / "run"
    )[0]
    assert (phase, step, failure) == ("FAILED", 3, "ValueError: no such label")
    assert phases == [["FORWARD", "START"], ["FAILED"]]


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        points = Points(10)
        for index in range(10):
            look("stream")
            yield points[index]


def own_loop(folder: Path) -> dict[str, list[tuple[str, int, int]]]:
    with RunManager(watch=NO_SIDECAR) as ddp, watched(ddp, folder) as onlooker:
        model = ddp.wrap(nn.Linear(6, 2).double())
        loader = ddp.loader(LookedAt(10, "data"), batch_size=4, accumulate=2)
        evaluation = ddp.loader(LookedAt(5, "evaluation data"), batch_size=2, train=False)
        stream = ddp.loader(Stream(), batch_size=4)
        onlooker.seen.clear()  # what was seen as samples were compared
        for _ in range(2):
            for inputs, targets in loader:
                functional.cross_entropy(model(inputs), targets).backward()
                look("loop")
            look("after an epoch")
            for _ in evaluation:
                look("evaluation")
            look("after an evaluation")
        for _ in range(2):
            for _ in stream:
                look("loop over a stream")
        for _ in loader:
            break
        look("given up")
    return onlooker.seen


def test_a_users_own_loop_has_the_heartbeats_of_its_loaders(tmp_path: Path) -> None:
    for rank, seen in enumerate(run_ranks(2, own_loop, tmp_path)):
        phases = {place: {phase for phase, *_ in looks} for place, looks in seen.items()}
        assert phases["data"] == phases["evaluation data"] == phases["stream"] == {"DATA"}
        # 10 samples in steps of 4: three a pass, the last of which has one micro-batch on each
        # rank.
        steps = [(0, 1), (0, 2), (1, 1), (1, 2), (2, 1), (3, 1), (3, 2), (4, 1), (4, 2), (5, 1)]
        assert seen["loop"] == [("USER", *step) for step in steps]
        assert seen["after an epoch"] == [("USER", 3, 0), ("USER", 6, 0)]
        assert phases["evaluation"] == {"EVALUATION"}
        assert phases["after an evaluation"] == {"USER"}
        assert seen["loop over a stream"] == [("USER", step, 1) for step in range(6)]
        assert seen["given up"] == [("USER", 6, 1)]
        last = read_heartbeat(tmp_path / f"rank-{rank:05d}.heartbeat")
        assert last is not None
        assert last.phase == Phase.LEFT


def loop_without_our_loader(folder: Path) -> list[Heartbeat]:
    """torch's own DataLoader; the group and the model are ours."""
    with RunManager(watch=NO_SIDECAR) as ddp, watched(ddp, folder):
        path = folder / f"rank-{ddp.rank:05d}.heartbeat"
        # As where there is a sidecar.
        count = ProgressMonitor(ddp.connection.heartbeat, sign=ddp._versions, every_s=0.02)
        model = ddp.wrap(nn.Linear(6, 2).double())
        looks = [beat_when(path, lambda beat: beat.collective == num_collectives())]
        for waits in (model.no_sync, nullcontext):
            for _ in range(10):
                for inputs, targets in DataLoader(Points(10), batch_size=5):
                    with waits():
                        functional.cross_entropy(model(inputs), targets).backward()
                time.sleep(0.05)
            looks.append(beat_when(path, lambda beat: True))
        count.close()
    return looks


def beat_when(path: Path, condition: Callable[[Heartbeat], bool]) -> Heartbeat:
    deadline = time.monotonic() + 60
    while (beat := read_heartbeat(path)) is None or not condition(beat):
        assert time.monotonic() < deadline, beat
        time.sleep(0.02)
    return beat


def test_a_loop_with_torchs_own_loader_is_seen_to_move(tmp_path: Path) -> None:
    """By its collectives, and where there are none (gradients are accumulated) by its gradients."""
    for first, accumulated, trained in run_ranks(2, loop_without_our_loader, tmp_path):
        assert first.num_moves + 2 <= accumulated.num_moves <= trained.num_moves - 2
        assert (trained.num_marks, trained.phase) == (1, Phase.USER)
        assert first.collective == accumulated.collective < trained.collective


@pytest.mark.parametrize(
    ("error", "phase", "failure"),
    [
        (ValueError("no such label"), Phase.FAILED, "ValueError: no such label"),
        (KeyboardInterrupt(), Phase.FAILED, "KeyboardInterrupt"),
        (
            SystemExit("no data"),
            Phase.FAILED,
            "sys.exit('no data') was called before the end of the run",
        ),
        (SystemExit(0), Phase.LEFT, ""),
    ],
)
def test_the_last_heartbeat_of_a_users_loop(
    tmp_path: Path, error: BaseException, phase: Phase, failure: str
) -> None:
    def leave() -> None:
        with RunManager() as ddp:
            ddp.connection.heartbeat = HeartbeatWriter(tmp_path / "heartbeat")
            raise error

    with pytest.raises(type(error)):
        leave()
    beat = read_heartbeat(tmp_path / "heartbeat")
    assert beat is not None
    assert (beat.phase, beat.failure) == (phase, failure)


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_the_exit_of_a_forked_child_is_not_its_ranks(tmp_path: Path) -> None:
    def fork_in_the_loop() -> None:
        with RunManager() as ddp:
            ddp.connection.heartbeat = HeartbeatWriter(tmp_path / "heartbeat")
            if (child := os.fork()) == 0:
                sys.exit(0)
            assert os.waitpid(child, 0)[1] == 0
            beat = read_heartbeat(tmp_path / "heartbeat")
            assert beat is not None
            assert (beat.phase, beat.num_marks) == (Phase.START, 0)

    parent = os.getpid()
    try:
        fork_in_the_loop()
    finally:
        if os.getpid() != parent:
            os._exit(0)


def test_processes_that_load_data_leave_the_record_of_their_rank_alone(tmp_path: Path) -> None:
    with RunManager() as ddp:
        ddp.connection.heartbeat = HeartbeatWriter(tmp_path / "heartbeat", rank=5)
        loader = ddp.loader(Points(12), batch_size=2, workers=2)
        assert len(list(loader)) == 6
        loader.close()
        beat = read_heartbeat(tmp_path / "heartbeat")
    assert beat is not None
    # Each batch is asked for and handed out; then one more is asked for, and there is none.
    assert (beat.num_marks, beat.pid, beat.rank) == (6 * 2 + 2, os.getpid(), 5)
    assert (beat.phase, beat.step) == (Phase.USER, 6)
