"""`drumline find-lr` and `drumline find-batch` as a user types them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from drumline.cli import main
from tests.cli.test_command import drumline, torch_blocked

# Without BatchNorm, whose statistics are those of a rank's part of the batch.
TASK = [
    "text",
    "--model.layers",
    "1",
    "--model.width",
    "32",
    "--model.context",
    "16",
    "--dist.device",
    "cpu",
]


@pytest.mark.soak
@pytest.mark.world_size(2)
@pytest.mark.usefixtures("warm")
def test_both_print_the_same_on_two_ranks_and_leave_nothing(tmp_path: Path) -> None:
    rates = []
    for procs in ("1", "2"):
        arguments = ["find-lr", *TASK, "--steps", "60", "--low", "1e-4", "--procs", procs]
        found = drumline(*arguments, "--json", cwd=tmp_path)
        assert found.returncode == 0, found.stdout + found.stderr
        rates.append(json.loads(found.stdout))
    alone, pair = rates
    assert alone["lr"] == pair["lr"] == alone["rate"]
    lowest = round(len(alone["losses"]) / 2)
    assert alone["losses"][:lowest] == pytest.approx(pair["losses"][:lowest], rel=1e-3)
    sizes = drumline("find-batch", *TASK, "--train.batch_size", "8", "--procs", "2", cwd=tmp_path)
    assert sizes.returncode == 0, sizes.stdout + sizes.stderr
    title, *rows, result, limits = sizes.stdout.splitlines()
    assert title == "micro-batch   samples/s"
    assert [row.split()[0] for row in rows] == ["1", "2", "4"]
    assert result.startswith("--train.micro_batch_size ")
    assert "; the global batch stays 8: " in result
    assert limits.startswith("on the CPU only speed is measured, not what fits")
    assert list(tmp_path.iterdir()) == []


def test_wrong_commands_are_explained_before_torch_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = drumline(
        "find-lr", "digits", "--low", "1", "--high", "0.1", cwd=tmp_path, **torch_blocked(tmp_path)
    )
    assert (first.returncode, "--low 1 is not below --high 0.1" in first.stderr) == (2, True), (
        first.stderr
    )
    for arguments, text in (
        (["find-lr"], "no TASK was given: one of digits"),
        (["find-lr", "digits", "--steps", "0"], "--steps"),
        (["find-batch", "digits", "--margin", "2"], "--margin"),
        (["find-batch", "digits", "--optim.lr", "-1"], "optim.lr"),
    ):
        assert main(arguments) == 2
        assert text in capsys.readouterr().err
    for verb in ("find-lr", "find-batch"):
        assert main([verb, "--help"]) == 0
        assert capsys.readouterr().out.startswith(f"usage: drumline {verb} TASK")
