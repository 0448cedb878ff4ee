from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from drumline.base.errors import (
    CheckpointError,
    DataError,
    NonFiniteError,
    Place,
    TrainingError,
    TrialError,
    UsageError,
)
from drumline.base.untrusted import parse_json
from drumline.config.schema import Config, DistConfig, TrainConfig
from drumline.data.sharding import Sharding
from drumline.training.failure_report import (
    can_restart,
    describe_failure,
    explain_out_of_memory,
    is_own,
    out_of_memory,
    subject,
)
from drumline.training.steps.eager import loss_function
from drumline.training.tasks.base import Loss, Task
from drumline.watch.failure_kind import FailureKind, failure_kind

PLACE = Place(host="node-b", rank=3, step=12)


def manager(world_size: int) -> Any:
    return SimpleNamespace(device=torch.device("cpu"), world_size=world_size)


def described(error: BaseException, place: Place = PLACE) -> str:
    try:
        raise error
    except BaseException as raised:
        return describe_failure(raised, place, run=Path("runs/mine"))


def test_our_own_errors_explain_themselves_and_where() -> None:
    text = described(DataError("no data in /x", next_step="mount it"))
    assert text == "drumline: error: no data in /x [rank 3 on node-b, step 12]\n  try: mount it\n"


def test_a_wrong_command_is_wrong_everywhere() -> None:
    before_the_first_step = Place(host="node-b", rank=3)
    assert (
        described(UsageError("no such task"), before_the_first_step)
        == "drumline: error: no such task\n"
    )
    assert "[rank 3 on node-b, step 12]" in described(UsageError("Loss.total has a shape"))


def test_other_errors_show_their_traceback_below_where_they_happened() -> None:
    lines = described(ValueError("boom")).splitlines()
    assert lines[0] == "drumline: error: rank 3 on node-b crashed at step 12: ValueError: boom"
    assert lines[1] == "  Traceback (most recent call last):"
    assert lines[-1] == "  ValueError: boom"


def test_a_traceback_begins_at_the_users_line() -> None:
    class Fails(Task):
        def loss(self, model: nn.Module, batch: Tensor) -> Loss:
            return Loss(model(batch).sum())

    try:
        loss_function(Fails(Config()))(nn.Linear(3, 2), torch.ones(1, 5))
    except RuntimeError as error:
        _, header, note, *frames = describe_failure(error, PLACE, run=Path("x")).splitlines()
    assert header == "  Traceback (most recent call last):"
    assert re.fullmatch(r"    \(\d frames of Drumline, torch and Python left out\)", note)
    # The user's code calls torch, and the last frame is where torch raised it.
    files = [line for line in frames if line.lstrip().startswith("File ")]
    assert all(__file__ in line for line in files[:-1])
    assert "torch/nn/modules/linear.py" in files[-1]
    assert "return Loss(model(batch).sum())" in "".join(frames)


def test_the_errors_that_one_was_raised_from_are_shortened_too() -> None:
    class Fails(Task):
        def on_device(self, batch: Tensor) -> Tensor:
            try:
                return batch["x"]  # type: ignore[index]
            except TypeError as error:
                raise ValueError("no x") from error

    try:
        loss_function(Fails(Config()))(nn.Linear(3, 2), torch.ones(1, 5))
    except ValueError as error:
        text = describe_failure(error, PLACE, run=Path("x"))
    assert text.count("Traceback (most recent call last):") == 2
    assert "drumline/training" not in text
    assert "TypeError" in text


def test_an_error_without_a_line_of_the_user_is_shown_whole() -> None:
    try:
        parse_json(b"{")
    except ValueError as error:
        error.__traceback__ = error.__traceback__.tb_next  # type: ignore[union-attr]  # without this file
        text = describe_failure(error, PLACE, run=Path("x"))
    assert "untrusted.py" in text
    assert "left out" not in text


@pytest.mark.parametrize(
    ("settings", "next_step"),
    [
        (
            {},
            "--train.micro_batch_size 16, half of the 32 samples that a rank now computes at once; the global batch "
            "stays as it is (drumline find-batch measures what fits)",
        ),
        (
            {"accumulate": 4},
            "--train.micro_batch_size 4 in place of --train.accumulate, half of the 8 samples",
        ),
        ({"micro_batch_size": 5}, "--train.micro_batch_size 2, half of the 5 samples"),
        ({"micro_batch_size": 1}, "--train.precision bf16, --dist.mode fsdp or a smaller model"),
    ],
)
def test_out_of_memory_names_the_micro_batch_that_would_fit(
    settings: dict[str, int], next_step: str
) -> None:
    config = Config(train=TrainConfig(batch_size=64, **settings))
    job: Any = SimpleNamespace(
        ddp=manager(2),
        batch=SimpleNamespace(size=64),
        loader=SimpleNamespace(sharding=Sharding(batch_size=64, rank=1, world_size=2, **settings)),
    )
    text = (
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 4.00 "
        "GiB of which some is free"
    )
    with pytest.raises(TrainingError) as caught, explain_out_of_memory(config, job):
        raise torch.OutOfMemoryError(text)
    what, instead = caught.value.lines()
    assert re.fullmatch(
        r"out of memory at test_failure_report\.py:\d+: CUDA out of memory\. Tried to allocate 2\.00 GiB",
        what,
    )
    assert next_step in instead
    assert failure_kind(caught.value) is FailureKind.OUT_OF_MEMORY


def test_out_of_memory_in_an_evaluation_names_its_batch() -> None:
    def evaluate() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has")

    job: Any = SimpleNamespace(ddp=manager(2))
    sentence = re.escape("try: --train.eval_batch_size 128, half of what it is")
    with pytest.raises(TrainingError, match=sentence), explain_out_of_memory(Config(), job):
        evaluate()


@pytest.mark.parametrize(
    ("mode", "world_size", "next_step"),
    [
        (
            "ddp",
            4,
            "--dist.mode fsdp, which shards the model and the optimizer's state over the ranks (drumline plan",
        ),
        ("ddp", 1, "--dist.mode fsdp on several GPUs, which"),
        ("fsdp", 4, "--dist.offload_optimizer, more GPUs or a smaller model"),
    ],
)
def test_out_of_memory_for_the_model_itself_names_a_mode(
    mode: Any, world_size: int, next_step: str
) -> None:
    # as the part of a step that makes the optimizer's state
    def _update() -> torch.OutOfMemoryError:
        with pytest.raises(torch.OutOfMemoryError) as caught:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0")
        return caught.value

    config = Config(dist=DistConfig(mode=mode))
    ddp = manager(world_size)
    job = cast(Any, object())
    for built in (None, job):
        error = out_of_memory(_update(), config, ddp, built)
        assert error.next_step is not None
        assert error.next_step.startswith(next_step)


def test_sys_exit_is_called_by_its_name_and_shows_where() -> None:
    first, *frames = described(SystemExit(0)).splitlines()
    assert first == (
        "drumline: error: sys.exit(0) was called before the end of the run [rank 3 on node-b, step 12]"
    )
    assert frames[0] == "  Traceback (most recent call last):"


@pytest.mark.parametrize(
    ("number", "what", "next_step"),
    [
        (errno.EDQUOT, "the disk quota is used up", "free some space, or ask for a larger quota"),
        (errno.EACCES, "no permission", f"let user id {os.geteuid()} read and write /data"),
        (errno.EROFS, "the file system is read-only", "mount the disk of /data for writing"),
    ],
)
def test_storage_that_refuses_is_explained_without_a_traceback(
    number: int, what: str, next_step: str
) -> None:
    assert described(OSError(number, os.strerror(number), "/data/x.bin")) == (
        f"drumline: error: {what}: /data/x.bin [rank 3 on node-b, step 12]\n"
        f"  try: {next_step}, then rerun the same command\n"
    )


def test_a_full_disk_without_a_file_name_is_the_runs_own() -> None:
    try:
        Path("/dev/full").write_text("x")
    except OSError as error:
        text = describe_failure(error, PLACE, run=Path("runs/mine"))
    assert text.startswith("drumline: error: the disk is full: ")
    assert " on the disk of runs/mine" in text
    assert text.endswith(", then rerun the same command\n")


def test_the_rank_that_an_error_names_is_the_one_it_is_about() -> None:
    place = Place(host="node-a", rank=1, step=11)
    assert subject(NonFiniteError("NaN", place=place), PLACE) == place
    assert subject(NonFiniteError("NaN", place=Place("node-a", 1)), PLACE) == Place("node-a", 1, 12)
    assert subject(NonFiniteError("NaN"), PLACE) == subject(ValueError(), PLACE) == PLACE


def raised(action: object) -> BaseException:
    try:
        action()  # type: ignore[operator]
    except BaseException as error:
        return error
    raise AssertionError("it did not fail")


def from_storage() -> None:
    try:
        raise OSError(errno.ENOSPC, "No space left on device")
    except OSError as error:
        raise CheckpointError("step 3 could not be saved") from error


def test_a_restart_is_worth_it_where_the_next_start_may_come_further() -> None:
    user_code = raised(lambda: torch.ones(2) @ torch.ones(3))
    assert type(user_code) is RuntimeError
    assert not can_restart(user_code, has_checkpoint=False), "it would raise at the same step"
    assert can_restart(user_code, has_checkpoint=True)
    for error in (raised(from_storage), PermissionError(errno.EACCES, "x")):
        assert not can_restart(error, has_checkpoint=True), "no restart frees a disk"
    assert can_restart(FileNotFoundError(errno.ENOENT, "x"), has_checkpoint=True)
    assert not can_restart(NonFiniteError("NaN"), has_checkpoint=True), (
        "the same steps lead to the same NaN"
    )
    assert can_restart(TrialError("out of memory"), has_checkpoint=False), (
        "it does not try these steps again"
    )


def test_an_error_that_another_process_may_have_caused_is_not_the_ranks_own() -> None:
    backward = raised(lambda: torch.ones(1).backward())
    for error in (
        dist.DistNetworkError("the client socket has failed to connect"),
        RuntimeError(
            "[/pytorch/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.1]:999"
        ),
        backward,
    ):
        assert not is_own(error)
        assert can_restart(error, has_checkpoint=False)
    assert is_own(ValueError("x"))
    assert is_own(SystemExit(0))
