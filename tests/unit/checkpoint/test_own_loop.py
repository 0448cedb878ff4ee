"""`ddp.checkpoint`, on one process: what it saves, what it refuses, and what it does about
damage."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from drumline import Checkpoint, DDPManager, load_checkpoint
from drumline.base.errors import CheckpointError, CheckpointMismatchError, UsageError
from drumline.checkpoint import store
from drumline.rank.determinism import capture_rng
from drumline.report.verify.run_check import verify_run
from drumline.runs import catalog
from drumline.runs.manifest import CorruptCheckpointError
from drumline.training.resume import check_contents
from tests.jobs import Points


class Running:
    """An object of the user's own, with a tensor and plain values."""

    def __init__(self) -> None:
        self.mean = torch.zeros(2, dtype=torch.float64)
        self.best = float("inf")

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean, "best": self.best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mean = state["mean"]
        self.best = state["best"]


class Loop:
    """Two models with an optimizer each, one for both, a schedule, a loader, and a state of its
    own."""

    def __init__(self, ddp: DDPManager, folder: Path, **objects: Any) -> None:
        self.loader = ddp.loader(Points(37), batch_size=8, accumulate=2)
        self.first = ddp.wrap(
            nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.3), nn.BatchNorm1d(4)).double()
        )
        self.second = ddp.wrap(nn.Linear(4, 2).double())
        self.optimizers = [
            torch.optim.AdamW(self.first.parameters(), lr=0.01),
            torch.optim.SGD(self.second.parameters(), lr=0.1, momentum=0.9),
            torch.optim.Adam([*self.first.parameters(), *self.second.parameters()], lr=0.001),
        ]
        self.schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(self.optimizers[1], patience=1)
        self.running = Running()
        self.ddp = ddp
        self.step = 0
        self.checkpoint: Checkpoint = ddp.checkpoint(
            folder,
            first=self.first,
            second=self.second,
            adam=self.optimizers[0],
            sgd=self.optimizers[1],
            both=self.optimizers[2],
            schedule=self.schedule,
            loader=self.loader,
            running=self.running,
            **objects,
        )

    def train(self, until: int, *, save_every: int = 0) -> None:
        while self.step < until:
            for inputs, targets in self.loader:
                with self.ddp.no_sync(
                    self.first, self.second, unless=self.loader.is_last_micro_batch
                ):
                    scores = self.second(self.first(inputs))
                    (nn.functional.cross_entropy(scores, targets) * self.loader.scale).backward()
                if not self.loader.is_last_micro_batch:
                    continue
                for optimizer in self.optimizers:
                    optimizer.step()
                for optimizer in self.optimizers:
                    optimizer.zero_grad()
                self.running.mean += scores.detach().mean(0)
                self.running.best = min(self.running.best, float(scores.detach().sum()))
                self.step += 1
                self.schedule.step(float(scores.detach().sum()))
                if save_every and self.step % save_every == 0:
                    self.checkpoint.save(self.step)
                if self.step == until:
                    return

    def bits(self) -> dict[str, Any]:
        """All that the rest of the run depends on."""
        weights = {
            **self.first.state_dict(),
            **{f"second.{key}": tensor for key, tensor in self.second.state_dict().items()},
        }
        return {
            "weights": {key: tensor.tolist() for key, tensor in weights.items()},
            "running": (self.running.mean.tolist(), self.running.best),
            "schedule": self.schedule.state_dict(),
            "rates": [
                group["lr"] for optimizer in self.optimizers for group in optimizer.param_groups
            ],
            "cursor": self.loader.cursor,
            "noise": torch.rand(2).tolist(),
        }


def test_a_resumed_loop_is_the_same_to_the_bit(tmp_path: Path) -> None:
    with DDPManager(seed=3) as ddp:
        whole = Loop(ddp, tmp_path / "whole")
        assert whole.checkpoint.resume() == 0
        whole.train(11)
        expected = whole.bits()
    with DDPManager(seed=3) as ddp:
        killed = Loop(ddp, tmp_path / "killed")
        killed.checkpoint.resume()
        # in the middle of the second epoch; steps 8 and 9 are lost
        killed.train(9, save_every=7)
    with DDPManager(seed=3) as ddp:
        resumed = Loop(ddp, tmp_path / "killed")
        resumed.step = resumed.checkpoint.resume()
        assert (resumed.step, resumed.loader.epoch) == (7, 1)
        resumed.train(11)
        assert resumed.bits() == expected


def test_what_a_step_folder_holds(tmp_path: Path) -> None:
    with DDPManager() as ddp:
        loop = Loop(ddp, tmp_path, keep_last=2)
        loop.checkpoint.resume()
        loop.train(4, save_every=1)
    assert catalog.list_steps(tmp_path / "checkpoints") == [3, 4]
    snapshot = store.read(tmp_path / "checkpoints/step-00000004")
    assert snapshot.documents["progress"] == {
        "step": 4,
        "objects": {
            "first": "model",
            "second": "model",
            "adam": "optimizer",
            "sgd": "optimizer",
            "both": "optimizer",
            "schedule": "state",
            "loader": "state",
            "running": "state",
        },
        "world_size": 1,
    }
    assert {*snapshot.tensors} == {"first", "second", "adam", "sgd", "both", "running", "rng"}
    assert "0.weight/exp_avg" in snapshot.tensors["adam"]
    assert "first.0.weight/exp_avg" in snapshot.tensors["both"]


@pytest.mark.parametrize(
    ("make", "what", "next_step"),
    [
        (lambda net: {}, "was given nothing to save", "name what to save"),
        (
            lambda net: {"model": net, "best": 0.5},
            "cannot save best: float has no state_dict() and load_state_dict()",
            "give models, optimizers, training loaders, or objects with both methods",
        ),
        (
            lambda net: {"progress": net},
            "cannot save an object as progress: files are named so",
            "taken are manifest",
        ),
        (
            lambda net: {"optimizer": torch.optim.SGD(net.parameters(), lr=1)},
            "cannot save optimizer: it has parameters of a model that was not given",
            "give the models of every optimizer, too",
        ),
        (
            lambda net: {"model": net, "keep_last": 0},
            "keep_last cannot be 0",
            "keep at least the newest",
        ),
    ],
)
def test_what_cannot_be_saved_is_refused_at_once(
    tmp_path: Path, make: Callable[[nn.Module], dict[str, Any]], what: str, next_step: str
) -> None:
    with DDPManager() as ddp, pytest.raises(UsageError) as caught:
        ddp.checkpoint(tmp_path, **make(nn.Linear(2, 2)))
    message, _, advice = str(caught.value).partition("\n  try: ")
    assert what in message
    assert next_step in advice
    assert not (tmp_path / "checkpoints").exists()


def test_a_folder_has_one_checkpoint_object(tmp_path: Path) -> None:
    with DDPManager() as ddp:
        ddp.checkpoint(tmp_path, model=nn.Linear(2, 2))
        with pytest.raises(UsageError, match="is the folder of another ddp"):
            ddp.checkpoint(str(tmp_path), model=nn.Linear(2, 2))


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    with DDPManager() as ddp, pytest.raises(UsageError, match=r"cannot use the folder .*mine: "):
        ddp.checkpoint(tmp_path / "mine", model=nn.Linear(2, 2))


def test_saves_come_after_resume_and_between_steps(tmp_path: Path) -> None:
    with DDPManager() as ddp:
        loop = Loop(ddp, tmp_path)
        with pytest.raises(
            UsageError, match=r"save\(1\) was called before resume\(\)\n  try: call resume\(\) once"
        ):
            loop.checkpoint.save(1)
        loop.checkpoint.resume()
        next(iter(loop.loader))
        with pytest.raises(UsageError) as caught:
            loop.checkpoint.save(1)
        assert str(caught.value) == (
            "save(1) was called in the middle of a step: loader has more micro-batches of it\n"
            "  try: save after optimizer.step(), where loader.is_last_micro_batch is True"
        )


def saved(folder: Path, *steps: int, **objects: Any) -> None:
    with DDPManager() as ddp:
        checkpoint = ddp.checkpoint(folder, keep_last=9, **objects)
        checkpoint.resume()
        for step in steps:
            checkpoint.save(step)


def resumed(folder: Path, **objects: Any) -> int:
    with DDPManager() as ddp:
        return ddp.checkpoint(folder, **objects).resume()


def test_a_changed_model_is_refused_by_name(tmp_path: Path) -> None:
    saved(tmp_path, 1, generator=nn.Linear(2, 3))
    with pytest.raises(CheckpointMismatchError) as caught:
        resumed(tmp_path, generator=nn.Linear(2, 5))
    assert str(caught.value).splitlines() == [
        "generator: the checkpoint is of another model:",
        "  - weight is [3, 2] in the checkpoint and [5, 2] in the model",
        "  - bias is [3] in the checkpoint and [5] in the model",
        "  try: build it as it was for the checkpoint, or give ddp.checkpoint another folder",
    ]


def test_other_objects_are_refused_by_name(tmp_path: Path) -> None:
    net = nn.Linear(2, 3)
    saved(
        tmp_path, 1, net=net, running=Running(), optimizer=torch.optim.SGD(net.parameters(), lr=1)
    )
    with pytest.raises(CheckpointMismatchError) as caught:
        resumed(tmp_path, net=net, optimizer=Running(), ema=nn.Linear(2, 3))
    assert str(caught.value).splitlines() == [
        "the checkpoint holds other objects than ddp.checkpoint was given:",
        "  - ema is not in the checkpoint",
        "  - running is in the checkpoint and was not given",
        "  - optimizer was an optimizer and is now another object",
        "  try: give the objects that it was saved with, by the same names, or another folder",
    ]


def test_an_object_that_refuses_its_state_is_named(tmp_path: Path) -> None:
    saved(tmp_path, 1, running=Running())

    class Renamed(Running):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.mean = state["average"]

    with pytest.raises(
        CheckpointMismatchError, match=r"running: Renamed\.load_state_dict\(\) failed: KeyError"
    ):
        resumed(tmp_path, running=Renamed())


def test_a_corrupt_checkpoint_is_skipped_for_the_one_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    net = nn.Linear(2, 3)
    saved(tmp_path, 3, 6, net=net)
    with (tmp_path / "checkpoints/step-00000006/net.safetensors").open("r+b") as file:
        file.truncate(20)
    with caplog.at_level(logging.WARNING, "drumline"):
        assert resumed(tmp_path, net=net) == 3
    (warning,) = caplog.messages
    assert "step-00000006 was skipped: net.safetensors has 20 of" in warning
    (tmp_path / "checkpoints/step-00000003/manifest.json").unlink()
    with pytest.raises(
        CheckpointError, match=r"no checkpoint in .* can be resumed; the newest: net\.safe"
    ):
        resumed(tmp_path, net=net)


def test_a_nan_is_marked_and_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    net = nn.Linear(2, 3)
    with DDPManager() as ddp, caplog.at_level(logging.WARNING, "drumline"):
        checkpoint = ddp.checkpoint(tmp_path, net=net)
        checkpoint.resume()
        checkpoint.save(1)
        nn.init.constant_(net.bias, torch.nan)
        checkpoint.save(2)
    assert caplog.messages == [
        "net/bias is not finite at step 2; resume() skips a checkpoint that is not"
    ]
    assert resumed(tmp_path, net=net) == 1
    assert bool(net.bias.isfinite().all())


def test_where_no_checkpoint_is_finite_the_newest_is_loaded_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    net = nn.Linear(2, 3)
    nn.init.constant_(net.bias, torch.nan)
    saved(tmp_path, 1, 2, net=net)
    with caplog.at_level(logging.WARNING, "drumline"):
        assert resumed(tmp_path, net=net) == 2
    newest = tmp_path / "checkpoints/step-00000002"
    assert caplog.messages[-1] == (
        f"no checkpoint is finite: net/bias of {newest} is not; to start again, give ddp.checkpoint another folder"
    )


def save_in_vain(folder: Path, *steps: int, error: Exception | None = None) -> None:
    """Saves into a folder whose place a file has taken."""
    with DDPManager() as ddp:
        checkpoint = ddp.checkpoint(folder, net=nn.Linear(2, 3))
        checkpoint.resume()
        (folder / "checkpoints").rmdir()
        (folder / "checkpoints").touch()
        for step in steps:
            checkpoint.save(step)
        if error is not None:
            raise error


@pytest.mark.parametrize("steps", [(1,), (1, 2)])
def test_a_save_that_fails_ends_the_loop(tmp_path: Path, steps: tuple[int, ...]) -> None:
    """At the end of the loop, or at the next save."""
    with pytest.raises(
        CheckpointError,
        match="step-00000001 could not be saved: a file is where a folder should be",
    ):
        save_in_vain(tmp_path, *steps)


def test_a_save_that_fails_hides_no_other_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "drumline"), pytest.raises(ZeroDivisionError):
        save_in_vain(tmp_path, 1, error=ZeroDivisionError())
    assert "step-00000001 could not be saved" in caplog.text


def test_the_folder_is_read_by_verify_and_load_checkpoint(tmp_path: Path) -> None:
    net = nn.Linear(2, 3)
    wider = nn.Linear(2, 3)
    saved(tmp_path, 3, 6, net=net)
    report = verify_run(tmp_path, lambda text: None)
    assert (
        report.problems,
        report.last_valid_step,
        [section.name for section in report.sections],
    ) == ([], 6, ["checkpoints"])
    assert report.sections[0].summary.startswith("2 of 2 complete (step 3, 6)")
    assert [str(note) for note in report.notes] == [
        "checkpoints: saved by ddp.checkpoint: a loop of your own records no samples, events or settings"
    ]
    assert load_checkpoint(tmp_path, wider, name="net")["step"] == 6
    assert torch.equal(wider.weight, net.weight)
    with pytest.raises(
        CheckpointError,
        match=r"holds no model, but net\n  try: load_checkpoint\(\.\.\., name='net'\)",
    ):
        load_checkpoint(tmp_path, wider)
    with (tmp_path / "checkpoints/step-00000003/rng.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\xff")
    (problem,) = verify_run(tmp_path, lambda text: None).problems
    assert "rng.safetensors: its checksum differs" in problem.what


def write(folder: Path, progress: dict[str, Any]) -> Path:
    """A checkpoint of step 1 whose checksums are right."""
    tensors = {
        "net": {"weight": torch.ones(2)},
        "rng": {"rank-00000": capture_rng(torch.device("cpu"))},
    }
    documents = {"progress": {"step": 1, "world_size": 1, **progress}, "net": {"aliases": {}}}
    return store.write(folder / "checkpoints", 1, tensors=tensors, documents=documents, metrics={})


@pytest.mark.parametrize(
    ("progress", "reason"),
    [
        ({"cursor": {"epoch": 0, "position": 8}}, "it was not saved by ddp.checkpoint"),
        (
            {"objects": {"net": "model", "ema": "model"}},
            "it does not hold what progress.json names",
        ),
        ({"objects": {"net": ["model"]}}, "it was not saved by ddp.checkpoint"),
        ({"objects": {"net": "model"}, "step": 7}, "it does not hold what progress.json names"),
        (
            {"objects": {"net": "model"}, "world_size": "2"},
            "it was not saved by ddp.checkpoint",
        ),
    ],
)
def test_what_something_else_wrote_is_not_resumed(
    tmp_path: Path, progress: dict[str, Any], reason: str
) -> None:
    write(tmp_path, progress)
    with pytest.raises(CheckpointError) as caught:
        resumed(tmp_path, net=nn.Linear(2, 3))
    assert str(caught.value).splitlines() == [
        f"no checkpoint in {tmp_path / 'checkpoints'} can be resumed; the newest: {reason}",
        "  try: restore one from a backup, or give ddp.checkpoint another folder",
    ]


def test_drumline_train_does_not_resume_a_loop_of_ones_own(tmp_path: Path) -> None:
    path = write(tmp_path, {"objects": {"net": "model"}})
    with pytest.raises(CorruptCheckpointError, match="it does not hold a model, an optimizer"):
        check_contents(path)


def test_a_changed_number_of_ranks_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    net = nn.Linear(2, 3)
    saved(tmp_path, 1, net=net)
    with DDPManager() as ddp, caplog.at_level(logging.WARNING, "drumline"):
        checkpoint = ddp.checkpoint(tmp_path, net=net)
        checkpoint._world_size = 2
        assert checkpoint.resume() == 1
    (warning,) = caplog.messages
    assert warning.startswith(
        "the number of ranks changed since the checkpoint: 1 -> 2; the samples of a loader"
    )
