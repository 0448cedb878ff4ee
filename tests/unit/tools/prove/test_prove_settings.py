"""What the runs of a proof are given: the user's settings, and what the proof needs besides."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from drumline.config import PRESETS, Layers, read_flags, read_layers
from drumline.tools.prove.proof_plan import ProofOptions, ProofSettings, wrong_settings

OWN_TASK = "mine.py:Task"


def layers(*argv: str, file: Path | None = None) -> Layers:
    return read_layers(read_flags(argv), config_file=file, environment={})


def options(*worlds: int, steps: int = 8) -> ProofOptions:
    return ProofOptions(worlds or (2, 2), steps, seed=0)


def chosen(
    *argv: str,
    task: Mapping[str, Any] | None = None,
    worlds: tuple[int, ...] = (2, 2),
    file: Path | None = None,
    steps: int = 8,
) -> ProofSettings:
    return ProofSettings(layers(*argv, file=file), task or {}, options(*worlds, steps=steps))


def settings(*argv: str, file: Path | None = None, **more: Any) -> dict[str, str]:
    given = chosen(*argv, file=file, **more).arguments(OWN_TASK, config_file=file and str(file))
    assert given[0] == OWN_TASK
    flags = read_flags(given[1:], verb_flags={"config": (str, "", "")})
    assert not flags.layer.problems
    return dict(flag.removeprefix("--").split("=", 1) for flag in given[1:])  # type: ignore[misc]


def test_what_the_proof_needs() -> None:
    assert settings() == {
        "checkpoint.every_steps": "2",
        "train.steps": "8",
        "log.trace": "true",
        "log.display": "none",
    }
    assert settings(worlds=(4, 2, 3))["train.exact"] == "elastic"


def test_the_users_settings_are_passed_on() -> None:
    argv = [
        "--model.widths",
        "8,16",
        "--optim.clip_norm",
        "none",
        "--no-data.pin_memory",
        "--optim.lr=1e-5",
    ]
    argv += ["--checkpoint.every_steps", "3", "--model.options.name", "a b"]
    values = settings(*argv)
    expected = {
        "model.widths": "8,16",
        "optim.clip_norm": "none",
        "data.pin_memory": "false",
        "optim.lr": "1e-05",
        "checkpoint.every_steps": "3",
        "model.options.name": "a b",
    }
    assert expected.items() <= values.items()


def test_a_file_is_passed_on_and_obeyed(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[checkpoint]\nevery_steps = 4\n[optim]\nwarmup_steps = 5\n")
    values = settings(file=file)
    assert values["config"] == str(file)
    assert not {"checkpoint.every_steps", "optim.warmup_steps"} & values.keys()


def test_a_warm_up_that_is_longer_than_the_run_is_shortened() -> None:
    assert settings(task=PRESETS["text"].defaults)["optim.warmup_steps"] == "4"
    assert settings("--optim.warmup_steps", "3")["optim.warmup_steps"] == "3"
    assert "optim.warmup_steps" not in settings(task={"optim.warmup_steps": 8})
    assert "optim.warmup_steps" not in settings()


def test_how_often_the_job_saves_is_not_touched_where_it_can_be_proved(tmp_path: Path) -> None:
    assert "checkpoint.every_steps" not in settings(task={"checkpoint.every_steps": 6})
    assert settings(task={"checkpoint.every_steps": 7})["checkpoint.every_steps"] == "2"
    assert settings("--checkpoint.every_steps", "0")["checkpoint.every_steps"] == "2"
    file = tmp_path / "config.toml"
    file.write_text("[checkpoint]\nevery_steps = 0\n")
    assert settings(file=file)["checkpoint.every_steps"] == "2", (
        "a run's own file says 0 where nobody said anything"
    )


def test_shards_by_speed_are_turned_off() -> None:
    assert settings(task={"data.balance": "auto"})["data.balance"] == "off"
    assert "data.balance" not in settings()


def test_what_is_changed_is_reported() -> None:
    task = {"checkpoint.every_steps": 7, "optim.warmup_steps": 50}
    assert chosen(task=task).describe_changes() == (
        "checkpoint.every_steps 2 (it was 7), optim.warmup_steps 4 (it was 50)"
    )
    assert chosen(task={"checkpoint.every_steps": 3}).describe_changes() == ""


@pytest.mark.parametrize(
    ("argv", "more", "problem"),
    [
        (
            ["--checkpoint.every_steps", "10"],
            {},
            "step 10, and each kill needs a step of its own after it and before",
        ),
        (["--checkpoint.every_steps", "10"], {}, "the end; give at least 12"),
        ([], {"steps": 3}, "--steps: 3 is too few: the first checkpoint is that of step 2"),
        (
            [],
            {"worlds": (4, 2), "task": {"train.shards": 3}},
            "--world: 4 ranks cannot share 3 shards (train.shards): some would have none",
        ),
    ],
)
def test_what_cannot_be_proved_is_known_before_anything_runs(
    argv: list[str], more: dict[str, Any], problem: str
) -> None:
    (said,) = chosen(*argv, **more).problems()
    assert problem in said


def test_what_may_be_proved_is_not_refused() -> None:
    assert not list(chosen().problems())
    assert not list(
        chosen("--checkpoint.every_steps", "10", "--checkpoint.every_epochs", "1").problems()
    )
    assert not list(chosen("--train.shards", "1").problems()), "the legs are alike"


@pytest.mark.parametrize(
    ("argv", "worlds", "problem"),
    [
        (["--train.steps", "9"], (2, 2), "--train.steps: use --steps instead"),
        (["--train.epochs", "9"], (2, 2), "--train.epochs: use --steps instead"),
        (["--no-log.trace"], (2, 2), "--log.trace: it is always on here"),
        (
            ["--log.display", "live"],
            (2, 2),
            "--log.display: the output of the runs goes to files here",
        ),
        (
            ["--train.exact", "world"],
            (4, 2),
            "--train.exact: world needs one number of ranks, and the legs have 4, 2",
        ),
    ],
)
def test_settings_that_the_proof_has_no_use_for(
    argv: list[str], worlds: tuple[int, ...], problem: str
) -> None:
    assert list(wrong_settings(layers(*argv), options(*worlds))) == [problem]


def test_settings_that_it_takes() -> None:
    assert not list(wrong_settings(layers("--train.exact", "elastic"), options(4, 2)))
    assert not list(wrong_settings(layers("--train.exact", "world"), options(2, 2)))


def test_modes_and_a_mode_exclude_each_other() -> None:
    proof_options = ProofOptions((2, 3), 8, seed=0, modes=("ddp", "fsdp"))
    assert list(wrong_settings(layers("--dist.mode", "fsdp"), proof_options)) == [
        "--dist.mode: --modes sets it for each leg"
    ]
    assert not proof_options.is_elastic
