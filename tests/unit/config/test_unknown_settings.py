"""What is suggested for a setting that does not exist."""

from __future__ import annotations

import pytest

from drumline.config.fields import FIELDS, OTHER_NAMES, nearest, unknown_setting


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("optim.learning_rate", ("optim.lr",)),  # what other tools call it
        ("learning-rate", ("optim.lr",)),
        ("optm.lr", ("optim.lr",)),  # the section misspelt
        ("optm.name", ("optim.name",)),  # and other sections have a `name` too
        ("log.every", ("log.every_steps",)),
        ("optim.momentun", ("optim.momentum",)),  # the name misspelt
        ("optim.weight-decay", ("optim.weight_decay",)),
        ("OPTIM.LR", ("optim.lr",)),
        ("lr", ("optim.lr",)),  # the section left out
        ("train.lr", ("optim.lr",)),  # the wrong section
        ("batchsize", ("train.batch_size",)),
        ("checkpoint.keep", ("checkpoint.keep_last",)),
        ("every_steps", ("checkpoint.every_steps", "log.every_steps")),
        ("epochs", ("train.epochs",)),  # although `procs` is spelt much like it
        ("prcos", ("procs",)),
        ("optim.zzz", ()),
    ],
)
def test_nearest(path: str, meant: tuple[str, ...]) -> None:
    assert nearest(path, besides=("run", "procs", "fresh")) == meant


def test_names_of_other_tools_point_at_settings_that_exist() -> None:
    assert OTHER_NAMES
    assert set(OTHER_NAMES.values()) <= set(FIELDS)


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("optim.learning_rate", "unknown setting; did you mean 'optim.lr'?"),
        (
            "every_steps",
            "unknown setting; did you mean 'checkpoint.every_steps' or 'log.every_steps'?",
        ),
        (
            "log.zzz",
            "unknown setting; log has every_steps, display, format, trackers, trace, profile, prometheus",
        ),
        (
            "zzz",
            "unknown setting; settings are named SECTION.NAME, with a section of "
            "model, data, optim, train, dist, checkpoint, watch, log, task",
        ),
    ],
)
def test_the_sentence_about_an_unknown_setting(path: str, sentence: str) -> None:
    assert unknown_setting(path) == sentence
