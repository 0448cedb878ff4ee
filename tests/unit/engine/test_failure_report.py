from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from drumline.engine.failure_report import can_restart, describe_failure, is_own, subject
from drumline.errors import CheckpointError, DataError, NonFiniteError, Place, UsageError

PLACE = Place(host="node-b", rank=3, step=12)


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
    assert described(UsageError("no such task"), before_the_first_step) == "drumline: error: no such task\n"
    assert "[rank 3 on node-b, step 12]" in described(UsageError("Loss.total has a shape"))


def test_other_errors_show_their_traceback_below_where_they_happened() -> None:
    lines = described(ValueError("boom")).splitlines()
    assert lines[0] == "drumline: error: rank 3 on node-b crashed at step 12: ValueError: boom"
    assert lines[1] == "  Traceback (most recent call last):"
    assert lines[-1] == "  ValueError: boom"


def test_sys_exit_is_called_by_its_name_and_shows_where() -> None:
    first, *frames = described(SystemExit(0)).splitlines()
    assert first == ("drumline: error: sys.exit(0) was called before the end of the run [rank 3 on node-b, step 12]")
    assert frames[0] == "  Traceback (most recent call last):"


@pytest.mark.parametrize(
    ("number", "what", "next_step"),
    [
        (errno.EDQUOT, "the disk quota is used up", "free some space, or ask for a larger quota"),
        (errno.EACCES, "no permission", f"let user id {os.geteuid()} read and write /data"),
        (errno.EROFS, "the file system is read-only", "mount the disk of /data for writing"),
    ],
)
def test_storage_that_refuses_is_explained_without_a_traceback(number: int, what: str, next_step: str) -> None:
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
    other = Place(host="node-a", rank=1, step=11)
    assert subject(NonFiniteError("NaN", place=other), PLACE) == other
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
    assert not can_restart(NonFiniteError("NaN"), has_checkpoint=True), "the same steps lead to the same NaN"


def test_an_error_that_another_process_may_have_caused_is_not_the_ranks_own() -> None:
    backward = raised(lambda: torch.ones(1).backward())
    for error in (
        dist.DistNetworkError("the client socket has failed to connect"),
        RuntimeError("[/pytorch/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.1]:999"),
        backward,
    ):
        assert not is_own(error)
        assert can_restart(error, has_checkpoint=False)
    assert is_own(ValueError("x"))
    assert is_own(SystemExit(0))
