"""TOML files: what they give, and every way in which they can be wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from drumline.config.config_file import read_config_file
from drumline.config.fields import FIELDS


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return Path("run.toml")


def test_a_file_gives_settings_of_all_kinds(file: Path) -> None:
    file.write_text(
        'train.epochs = 3\n[optim]\nlr = 1\nclip_norm = "none"\nbetas = [0.8, 0.9]\n'
        "[model]\nwidths = [8, 16]\noptions = { hidden = 64 }\n"
    )
    layer = read_config_file(file)
    assert layer.problems == ()
    assert {path: setting.value for path, setting in layer.settings.items()} == {
        "train.epochs": 3,
        "optim.lr": 1.0,
        "optim.clip_norm": None,
        "optim.betas": (0.8, 0.9),
        "model.widths": (8, 16),
        "model.options.hidden": 64,
    }


def test_a_setting_that_was_removed_is_left_out(file: Path) -> None:
    file.write_text("[dist]\ngradient_as_bucket_view = true\nstatic_graph = true\n")
    layer = read_config_file(file)
    assert layer.problems == ()
    assert list(layer.settings) == ["dist.static_graph"]


@pytest.mark.parametrize(
    ("value", "trackers"),
    [("true", ("tensorboard",)), ("false", None), ("[1]", None)],
)
def test_a_setting_of_an_earlier_version_is_read_as_what_it_is_today(
    file: Path, value: str, trackers: object
) -> None:
    file.write_text(f'[log]\ntrackers = "none"\ntensorboard = {value}\n')
    layer = read_config_file(file)
    assert layer.problems == ()
    assert layer.settings["log.trackers"].value == trackers


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[optim]\n# slow\nlr = -1.0\n", "run.toml:3: optim.lr = -1.0 must be above 0"),
        ("[optim]\nlr = 'fast'", "run.toml:2: optim.lr = 'fast' is not a number"),
        ("[optim]\nlr = nan", "run.toml:2: optim.lr = nan is not a finite number"),
        (
            "[log]\n[optim]\n  'name' = 'sdg'",
            "run.toml:3: optim.name = 'sdg' is not one of sgd, adamw, muon, package.Class; did you mean 'sgd'?",
        ),
        ("optim.lr = 0", "run.toml:1: optim.lr = 0.0 must be above 0"),
        ("\noptim = {lr = 0}", "run.toml:2: optim.lr = 0.0 must be above 0"),
        ('optim = {"l\\u0072" = 0}', "run.toml:1: optim.lr = 0.0 must be above 0"),
        ('"opti\\u006d" = {lr = 0}', "run.toml: optim.lr = 0.0 must be above 0"),
        (
            "[optim]\nlearning_rate = 1",
            "run.toml:2: optim.learning_rate: unknown setting; did you mean 'optim.lr'?",
        ),
        ("lr = 1", "run.toml:1: lr: unknown setting; did you mean 'optim.lr'?"),
        ("[optim]\n[optim.lr]\nx = 1", "run.toml:2: optim.lr = {'x': 1} is not a number"),
        ("[optm]\nlr = 1\nname = 2", "run.toml:1: optm: unknown section; did you mean 'optim'?"),
        ("optim = 3", "run.toml:1: optim = 3 is not a section; write [optim]"),
        ("[[optim]]\nlr = 1", "run.toml:1: optim = [{'lr': 1}] is not a section; write [optim]"),
        (
            "[model.options]\nsizes = [1]",
            "run.toml:2: model.options.sizes = [1] is not text, a number, true or false",
        ),
        (
            "[model.options]\n'a.b' = 1",
            "run.toml:2: model.options.a.b: 'a.b' cannot be the name of a keyword argument",
        ),
        (
            "[model]\noptions = 3",
            "run.toml:2: model.options = 3 is not a table; set its options one by one, each by its own name",
        ),
    ],
)
def test_each_problem_names_the_file_the_line_and_the_value(
    file: Path, text: str, problem: str
) -> None:
    file.write_text(text)
    assert read_config_file(file).problems == (problem,)


def test_a_file_that_is_not_toml_is_a_problem_with_its_line(file: Path) -> None:
    file.write_text("[optim]\nlr = = 3\n")
    (problem,) = read_config_file(file).problems
    assert problem.startswith("run.toml: is not valid TOML: ")
    assert "line 2" in problem


def test_a_missing_file_is_a_problem_that_says_where_it_was_looked_for(file: Path) -> None:
    assert read_config_file(file).problems == (
        f"run.toml: there is no such file (looked in {Path.cwd()})",
    )


def test_a_file_that_cannot_be_read_is_a_problem(file: Path) -> None:
    file.mkdir()
    assert read_config_file(file).problems == ("run.toml: cannot be read: Is a directory",)


def test_a_file_that_is_not_text_is_a_problem(file: Path) -> None:
    file.write_bytes(b"[optim]\n\xff\xfe")
    assert read_config_file(file).problems == ("run.toml: is not UTF-8 text (byte 8)",)


def test_what_an_unreadable_file_would_have_set_is_left_out_of_all_rules(file: Path) -> None:
    assert read_config_file(file).broken == frozenset(FIELDS)


def test_a_byte_order_mark_is_no_problem(file: Path) -> None:
    file.write_text("[optim]\nlr = 0.5\n", encoding="utf-8-sig")
    assert read_config_file(file).settings["optim.lr"].value == 0.5
