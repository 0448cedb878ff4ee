"""`drumline verify` as a user types it: its text, its JSON, and its exit codes."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.jobs import Classify, make_config, train_here

ROOT = Path(__file__).parents[2]


def verify(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run it where importing torch is an error."""
    block = cwd / "no_torch"
    block.mkdir(exist_ok=True)
    (block / "torch.py").write_text("raise ImportError('torch was imported')")
    return subprocess.run(
        [sys.executable, "-m", "drumline", "verify", *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": f"{block}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.fixture(scope="module", name="trained")
def train_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("verify") / "spirals"
    train_here(make_config(epochs=2), Classify, run)
    return run


@pytest.fixture(name="runs")
def copy_run(trained: Path, tmp_path: Path) -> Path:
    shutil.copytree(trained, tmp_path / "runs" / "spirals")
    return tmp_path


def test_a_run_without_problems(runs: Path) -> None:
    result = verify("runs/spirals", cwd=runs)
    assert (result.returncode, result.stderr) == (0, "")
    assert re.sub(r"[\d.]+ kB", "9 kB", result.stdout).splitlines() == [
        "runs/spirals",
        "  checkpoints  2 of 2 complete (step 5, 10), 9 kB",
        "  samples      2 epochs of 37 samples, each exactly once; 10 steps in 1 start on 1 rank",
        "  events       17 events of 1 rank in 1 attempt, none missing",
        "  settings     config.toml and environment.json can be read",
        "no problems found",
    ]


def test_what_is_wrong_is_listed_and_the_exit_code_is_1(runs: Path) -> None:
    (runs / "runs/spirals/checkpoints/step-00000010/rng.safetensors").unlink()
    (runs / "runs/spirals/checkpoints/.step-00000012.partial").mkdir()
    shutil.copytree(runs / "runs" / "spirals", runs / "runs" / "other")
    (runs / "runs/other/config.toml").unlink()
    result = verify("runs/spirals", "runs/other", cwd=runs)
    assert result.returncode == 1
    first, second = result.stdout.split("\n\n")
    assert [line for line in first.splitlines() if line.startswith(("  note", "  problem"))] == [
        "  note: checkpoints/.step-00000012.partial: left by a save that did not finish; the next save deletes it",
        "  problem: checkpoints/step-00000010: corrupt or incomplete: rng.safetensors is missing",
    ]
    assert first.splitlines()[-1] == "1 problem found; a run would resume from step 5"
    assert second.splitlines()[-1] == "2 problems found; a run would resume from step 5"
    shutil.rmtree(runs / "runs/other/checkpoints/step-00000005")
    assert verify("runs/other", cwd=runs).stdout.endswith(
        "2 problems found; no checkpoint is complete and finite\n"
    )


def test_json_for_scripts(runs: Path) -> None:
    valid = verify("runs/spirals", "--json", cwd=runs)
    assert valid.returncode == 0
    (run,) = json.loads(valid.stdout)["runs"]
    assert (run["run"], run["valid"], run["job_at_work"], run["last_valid_step"]) == (
        "runs/spirals",
        True,
        None,
        10,
    )
    assert run["parts"]["samples"]["steps"] == 10
    assert run["problems"] == run["notes"] == []
    (runs / "runs/spirals/config.toml").unlink()
    wrong = verify("--json", "runs/spirals", cwd=runs)
    assert wrong.returncode == 1
    answer = json.loads(wrong.stdout)
    assert answer["valid"] is False
    assert answer["runs"][0]["problems"] == [
        {"part": "settings", "where": "config.toml", "what": "is missing"}
    ]


def test_damaged_events_are_reported_in_json_too(runs: Path) -> None:
    path = runs / "runs/spirals/events/rank-00000.jsonl"
    lines = path.read_text().splitlines()
    for number, field in ((0, "world_size"), (2, "step")):
        lines[number] = json.dumps({**json.loads(lines[number]), field: None})
    path.write_text("\n".join(lines) + "\n")
    result = verify("--json", "runs/spirals", cwd=runs)
    assert (result.returncode, result.stderr) == (1, "")
    descriptions = [problem["what"] for problem in json.loads(result.stdout)["runs"][0]["problems"]]
    assert descriptions == [
        "damaged: Expected `int`, got `null` - at `$.world_size`",
        "damaged: Expected `int`, got `null` - at `$.step`",
    ]


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        ([], ["no RUN was given", "try: give a run folder, as in: drumline verify runs/digits"]),
        (["--jsn", "runs/spirals"], ["--jsn: unknown flag; did you mean '--json'?"]),
        (["runs/spiral"], ["there is no run folder runs/spiral; did you mean 'spirals'?"]),
        (["runs/w"], ["there is no run folder runs/w; known runs here: spirals"]),
        (["nowhere/run"], ["there is no run folder nowhere/run\n"]),
        (
            ["runs/spirals/config.toml"],
            ["runs/spirals/config.toml is not a run folder: ", "try: give the folder of --run"],
        ),
        (["runs"], ["runs is not a run folder", "try: give one of the runs in it: spirals"]),
        (
            ["no_torch"],
            [
                "no_torch is not a run folder: it has no config.toml, events or checkpoints",
                "of --run",
            ],
        ),
    ],
)
def test_wrong_usage_is_explained(runs: Path, arguments: list[str], messages: list[str]) -> None:
    result = verify(*arguments, cwd=runs)
    assert result.returncode == 2
    for message in messages:
        assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_help_teaches(tmp_path: Path) -> None:
    result = verify("--help", cwd=tmp_path)
    assert result.returncode == 0
    for part in (
        "usage: drumline verify RUN",
        "--json",
        "exactly once",
        "0 no problems, 1 problems were found",
    ):
        assert part in result.stdout


def test_a_terminal_shows_progress(runs: Path) -> None:
    ours, theirs = pty.openpty()
    result = subprocess.run(
        [sys.executable, "-m", "drumline", "verify", "runs/spirals"],
        cwd=runs,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=theirs,
        check=True,
    )
    os.close(theirs)
    parts = []
    # the end of a terminal; on a busy machine its text arrives bit by bit
    with contextlib.suppress(OSError):
        while part := os.read(ours, 4096):
            parts.append(part)
    os.close(ours)
    shown = b"".join(parts).decode()
    assert "checkpoint 1 of 2: step-00000005" in shown
    assert shown.endswith("\r\x1b[K"), "the line is cleared in the end"
    assert b"checkpoint 1 of 2" not in result.stdout
