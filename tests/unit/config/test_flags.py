"""The grammar of the command line."""

from __future__ import annotations

from typing import Any

import pytest

from drumline.config.flags import REPEATED, read_flags
from drumline.config.schema import Count

OWN = {
    name: (kind, "", "")
    for name, kind in {"run": str, "procs": Count, "fresh": bool, "help": bool}.items()
}


def values(*argv: str) -> dict[str, Any]:
    flags = read_flags(argv)
    assert flags.layer.problems == ()
    return {path: setting.value for path, setting in flags.layer.settings.items()}


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], {}),
        (["--optim.lr", "0.5"], {"optim.lr": 0.5}),
        (["--optim.lr=0.5"], {"optim.lr": 0.5}),
        (["--data.dir=a=b"], {"data.dir": "a=b"}),
        (["--data.dir=-odd"], {"data.dir": "-odd"}),
        (["--dist.sync_batchnorm"], {"dist.sync_batchnorm": True}),
        (
            ["--dist.sync_batchnorm", "--optim.lr", "1"],
            {"dist.sync_batchnorm": True, "optim.lr": 1.0},
        ),
        (["--dist.sync_batchnorm", "off"], {"dist.sync_batchnorm": False}),
        (["--dist.sync_batchnorm=0"], {"dist.sync_batchnorm": False}),
        (["--no-dist.sync_batchnorm"], {"dist.sync_batchnorm": False}),
        (["--model.options.offset", "-3"], {"model.options.offset": -3}),
        (["--model.options.offset", "-.5e-3"], {"model.options.offset": -0.5e-3}),
        (["--optim.lr", "0.5", "--optim.lr=0.5"], {"optim.lr": 0.5}),
    ],
)
def test_the_grammar(argv: list[str], expected: dict[str, Any]) -> None:
    assert values(*argv) == expected


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["--optim.lr", "fast"], "--optim.lr: 'fast' is not a number"),
        (["--optim.lr", "-1"], "--optim.lr: -1.0 must be above 0"),
        (["--optim.lr", "-inf"], "--optim.lr: -inf is not a finite number"),
        (
            ["--optim.betas", "-0.1,0.9"],
            "--optim.betas: [-0.1, 0.9], where -0.1 must be between 0 and 1",
        ),
        (
            ["--optim.name", "sdg"],
            "--optim.name: 'sdg' is not one of sgd, adamw, muon, package.Class; did you mean 'sgd'?",
        ),
        (
            ["--model.activation_checkpointing=some"],
            "--model.activation_checkpointing: 'some' is not none | full | every:N",
        ),
        (
            ["--optim.learning_rate", "1"],
            "--optim.learning_rate: unknown setting; did you mean 'optim.lr'?",
        ),
        (["-optim.lr", "1"], "-optim.lr: unknown setting; did you mean 'optim.lr'?"),
        (
            ["--optim.learning_rate"],
            "--optim.learning_rate: unknown setting; did you mean 'optim.lr'?",
        ),
        (
            ["--no-dist.sync_bachnorm"],
            "--no-dist.sync_bachnorm: unknown setting; did you mean 'dist.sync_batchnorm'?",
        ),
        (["--data.augment=maybe"], "--data.augment: 'maybe' is not true or false"),
        (["--optim.lr"], "--optim.lr: the value is missing (number above 0)"),
        (["--optim.lr", "--data.augment"], "--optim.lr: the value is missing (number above 0)"),
        (["--data.dir", "-odd"], "--data.dir: the value is missing (text, or none)"),
        (
            ["--optim.lr", "0.1", "--optim.lr", "0.2"],
            "--optim.lr: given twice, as '0.1' and as '0.2'",
        ),
        (
            ["--data.augment", "--no-data.augment"],
            "--no-data.augment: given twice, as 'true' and as 'false'",
        ),
        (
            ["--no-data.augment=true"],
            "--no-data.augment: takes no value; write --data.augment=true or --data.augment=false",
        ),
        (
            ["--no-optim.lr"],
            "--no-optim.lr: only a true | false setting can be turned off this way",
        ),
        (
            ["--no-optim.clip_norm"],
            "--no-optim.clip_norm: only a true | false setting can be turned off this way; "
            "write --optim.clip_norm none",
        ),
        (["digits"], "'digits': unexpected argument; a flag is given as --name value"),
        (["--"], "'--': unexpected argument; a flag is given as --name value"),
        (
            ["--model.options.a-b", "1"],
            "--model.options.a-b: 'a-b' cannot be the name of a keyword argument",
        ),
        (
            ["--model.options", "1"],
            "--model.options: '1' is not a table; set its options one by one, each by its own name",
        ),
    ],
)
def test_each_problem_is_one_sentence(argv: list[str], problem: str) -> None:
    assert problem in read_flags(argv).layer.problems


@pytest.mark.parametrize(
    ("argv", "value"),
    [
        (["--model.activation_checkpointing", "--train.epochs", "1"], True),
        (["--model.activation_checkpointing", "every:2"], "every:2"),
        (["--model.activation_checkpointing=full"], True),
        (["--model.activation_checkpointing", "none"], False),
        (["--model.activation_checkpointing", "off"], False),
        (["--no-model.activation_checkpointing"], False),
    ],
)
def test_activation_checkpointing_is_a_switch_or_a_policy(
    argv: list[str], value: bool | str
) -> None:
    assert values(*argv)["model.activation_checkpointing"] == value


def test_a_problem_does_not_hide_the_next_one() -> None:
    layer = read_flags(["stray", "--optim.lr", "fast", "--data.workers", "--optm.lr", "1"]).layer
    assert len(layer.problems) == 4


def test_an_option_set_to_none_does_not_count_for_an_exclusive_pair() -> None:
    assert values("--train.epochs", "none", "--train.steps", "2") == {
        "train.epochs": None,
        "train.steps": 2,
    }


def test_the_commands_own_flags_and_words_are_distinguished_from_settings() -> None:
    argv = ["--fresh", "digits", "--procs", "2", "--optim.lr", "0.5", "--run=out", "-h"]
    flags = read_flags(argv, verb_flags=OWN, max_positional=1)
    assert flags.values == {"fresh": True, "procs": 2, "run": "out", "help": True}
    assert flags.positional == ("digits",)
    assert list(flags.layer.settings) == ["optim.lr"]
    assert flags.layer.problems == ()


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["--procs", "two"], "--procs: 'two' is not a whole number"),
        (["--procs", "0"], "--procs: 0 must be at least 1"),
        (["--run"], "--run: the value is missing (text)"),
        (["--prcos", "2"], "--prcos: unknown setting; did you mean 'procs'?"),
        (["digits", "again"], "'again': unexpected argument; a flag is given as --name value"),
    ],
)
def test_problems_with_the_commands_own_flags_are_collected_too(
    argv: list[str], problem: str
) -> None:
    assert read_flags(argv, verb_flags=OWN, max_positional=1).layer.problems == (problem,)


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["--optim.lr", "1"], "--optim.lr: is for a run"),
        (["--prcos", "2"], "--prcos: unknown flag; did you mean '--procs'?"),
        (["--zzz"], "--zzz: unknown flag; known: --fresh, --help, --procs, --run"),
    ],
)
def test_a_verb_without_settings_knows_its_own_flags_only(argv: list[str], problem: str) -> None:
    flags = read_flags([*argv, "--procs", "3"], OWN, no_settings="is for a run")
    assert flags.layer.problems == (problem,)
    assert flags.values == {"procs": 3}


def test_a_repeated_flag_keeps_each_value_as_it_is() -> None:
    flags = read_flags(
        ["--env", "A=1", "--env=B=true", "--env", "A=2"], verb_flags={"env": (REPEATED, "", "")}
    )
    assert flags.values == {"env": ["A=1", "B=true", "A=2"]}
    assert not flags.layer.problems
