"""What the runs of a proof are given: the user's settings, and what the proof needs besides."""

from __future__ import annotations

from pathlib import Path

import pytest

from drumline.config import Layers, read_flags, read_layers
from drumline.prove.schedule import Wishes
from drumline.prove.settings import train_arguments, wrong_settings

OWN_TASK = "mine.py:Task"


def layers(*argv: str, file: Path | None = None) -> Layers:
    return read_layers(read_flags(argv), config_file=file, environment={})


def wishes(*worlds: int, steps: int = 8) -> Wishes:
    return Wishes(worlds or (2, 2), steps, seed=0)


def settings(
    task: str, *argv: str, worlds: tuple[int, ...] = (2, 2), file: Path | None = None
) -> dict[str, str]:
    given = train_arguments(task, layers(*argv, file=file), wishes(*worlds), config_file=file and str(file))
    assert given[0] == task
    flags = read_flags(given[1:], own={"config": str})
    assert not flags.layer.problems
    return dict(flag.removeprefix("--").split("=", 1) for flag in given[1:])  # type: ignore[misc]


def test_what_the_proof_needs() -> None:
    assert settings("digits") == {
        "checkpoint.keep_last": "8",
        "checkpoint.every_steps": "2",
        "train.steps": "8",
        "log.trace": "true",
        "log.display": "none",
    }
    assert settings("digits", worlds=(4, 2, 3))["train.exact"] == "elastic"


def test_the_users_settings_are_passed_on() -> None:
    argv = ["--model.widths", "8,16", "--optim.clip_norm", "none", "--no-data.pin_memory", "--optim.lr=1e-5"]
    argv += ["--checkpoint.every_steps", "3", "--model.options.name", "a b"]
    found = settings(OWN_TASK, *argv)
    wanted = {
        "model.widths": "8,16",
        "optim.clip_norm": "none",
        "data.pin_memory": "false",
        "optim.lr": "1e-05",
        "checkpoint.every_steps": "3",
        "model.options.name": "a b",
    }
    assert wanted.items() <= found.items()


def test_a_file_is_passed_on_and_heeded(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[checkpoint]\nevery_steps = 4\n[optim]\nwarmup_steps = 5\n")
    found = settings(OWN_TASK, file=file)
    assert found["config"] == str(file)
    assert not {"checkpoint.every_steps", "optim.warmup_steps"} & found.keys()


def test_a_warm_up_that_is_longer_than_the_run_is_shortened() -> None:
    assert settings("text")["optim.warmup_steps"] == "4"
    assert settings(OWN_TASK)["optim.warmup_steps"] == "4"
    assert settings("digits", "--optim.warmup_steps", "3")["optim.warmup_steps"] == "3"
    assert "optim.warmup_steps" not in settings("digits")


@pytest.mark.parametrize(
    ("argv", "worlds", "problem"),
    [
        (["--train.steps", "9"], (2, 2), "--train.steps: --steps says how long to train here"),
        (["--train.epochs", "9"], (2, 2), "--train.epochs: --steps says how long to train here"),
        (["--no-log.trace"], (2, 2), "--log.trace: it is always on here"),
        (["--log.display", "live"], (2, 2), "--log.display: what the runs print goes to files here"),
        (
            ["--train.exact", "world"],
            (4, 2),
            "--train.exact: world keeps the bits on one number of ranks, and the legs have 4, 2",
        ),
    ],
)
def test_settings_that_the_proof_has_no_use_for(
    argv: list[str], worlds: tuple[int, ...], problem: str
) -> None:
    assert list(wrong_settings(layers(*argv), wishes(*worlds))) == [problem]


def test_settings_that_it_takes() -> None:
    assert not list(wrong_settings(layers("--train.exact", "elastic"), wishes(4, 2)))
    assert not list(wrong_settings(layers("--train.exact", "world"), wishes(2, 2)))
