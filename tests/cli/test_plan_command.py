"""`drumline plan` as a user types it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from drumline.cli import main
from tests.cli.test_command import drumline, torch_blocked


@pytest.mark.usefixtures("warm")
def test_the_table_and_the_json_agree_and_nothing_is_left(tmp_path: Path) -> None:
    words = ["plan", "synthetic", "--model.widths", "8", "--world", "1,2,128", "--gpu", "t4,0.5"]
    shown = drumline(*words, cwd=tmp_path)
    assert shown.returncode == 0, shown.stdout + shown.stderr
    title, head, *rows = shown.stdout.splitlines()
    assert title.startswith("memory of a rank at the peak of a step, ")
    assert head.split() == [
        "ranks",
        "micro-batch",
        "mode",
        "parameters",
        "gradients",
        "optimizer",
        "activations",
        "communication",
        "total",
    ]
    assert [row.split()[:3] for row in rows[:4]] == [
        ["1", "64", "ddp"],
        ["2", "32", "ddp"],
        ["2", "32", "zero1"],
        ["2", "32", "fsdp"],
    ]
    assert (
        rows[4] == "  128  a global batch of 64 cannot be split over 128 ranks: each needs a sample"
    )
    assert [row.split() for row in rows[5:]] == [
        [],
        ["cheapest", "mode", "that", "fits", "1", "rank", "2", "ranks"],
        ["t4", "(14.5", "GiB)", "ddp", "ddp"],
        ["0.5", "GiB", "(512", "MiB)", "none", "none"],
    ]
    printed = drumline(*words, "--json", cwd=tmp_path)
    document = json.loads(printed.stdout)
    assert [[rank["world_size"], rank["mode"]] for rank in document["ranks"]] == [
        [1, "ddp"],
        [2, "ddp"],
        [2, "zero1"],
        [2, "fsdp"],
    ]
    parts = ("parameters", "gradients", "optimizer", "activations", "communication")
    assert all(rank["total"] == sum(rank[part] for part in parts) > 0 for rank in document["ranks"])
    assert document["gpus"][0]["modes"] == {"1": "ddp", "2": "ddp"}
    assert list(tmp_path.iterdir()) == []


def test_wrong_commands_are_explained_before_torch_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = drumline("plan", "digits", "--gpu", "h1000", cwd=tmp_path, **torch_blocked(tmp_path))
    assert (first.returncode, "--gpu h1000: there is no such GPU" in first.stderr) == (2, True), (
        first.stderr
    )
    for arguments, text in (
        (["plan"], "no TASK was given"),
        (["plan", "digits", "--world", "0"], "--world"),
    ):
        assert main(arguments) == 2
        assert text in capsys.readouterr().err
    assert main(["plan", "--help"]) == 0
    assert capsys.readouterr().out.startswith("usage: drumline plan TASK")
