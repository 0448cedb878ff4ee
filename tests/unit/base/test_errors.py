from __future__ import annotations

import pytest

from drumline.base import errors
from drumline.base.errors import ConfigError, DrumlineError, ExitCode, Place, did_you_mean


def test_a_message_says_what_where_and_what_next() -> None:
    error = DrumlineError("the disk is full", next_step="free some space").located(
        Place("node-b", 3, 812)
    )
    assert str(error) == "the disk is full [rank 3 on node-b, step 812]\n  try: free some space"


def test_what_an_error_knows_of_its_place_is_kept() -> None:
    error = DrumlineError("torn", place=Place(host="node-a")).located(Place("node-b", 1))
    assert str(error) == "torn [rank 1 on node-a]"


def test_a_place_leaves_out_what_it_does_not_know() -> None:
    assert str(Place()) == ""
    assert str(Place(host="a")) == "a"
    assert str(Place(step=4)) == "step 4"


def test_config_errors_list_every_problem() -> None:
    error = ConfigError(["one", "two"], next_step="read the help")
    assert str(error) == "2 problems in the configuration:\n  - one\n  - two\n  try: read the help"
    assert str(ConfigError(["one"])).startswith("1 problem in")


def test_exit_codes_are_stable() -> None:
    assert {code.name: int(code) for code in ExitCode} == {
        "SUCCESS": 0,
        "TRAINING_FAILED": 1,
        "USAGE": 2,
        "PREFLIGHT_FAILED": 3,
        "HANG": 70,
        "PREEMPTED": 75,
        "INTERRUPTED": 130,
    }
    assert errors.ConfigError.exit_code == ExitCode.USAGE
    assert errors.DataError.exit_code == ExitCode.PREFLIGHT_FAILED
    assert errors.CheckpointError.exit_code == ExitCode.TRAINING_FAILED


@pytest.mark.parametrize(
    ("word", "sentence"), [("sdg", "did you mean 'sgd'?"), ("zzz", "known: adamw, sgd")]
)
def test_did_you_mean(word: str, sentence: str) -> None:
    assert did_you_mean(word, ["sgd", "adamw"]) == sentence
