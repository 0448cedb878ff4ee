"""Coercion: every kind of field, from a file's value and from a command-line string, and every
refusal."""

from __future__ import annotations

import datetime
from typing import Any

import pytest

from drumline.config.fields import (
    FIELDS,
    Mismatch,
    annotation_of,
    describe_type,
    from_text,
    from_value,
)

ACCEPTED_TEXT = [
    ("model.blocks", "3", 3),
    ("optim.lr", "1e-3", 1e-3),
    ("optim.lr", "1", 1.0),
    ("data.augment", "yes", True),
    ("data.augment", "On", True),
    ("data.augment", "1", True),
    ("data.augment", "0", False),
    ("data.augment", "no", False),
    ("data.augment", "off", False),
    ("data.dir", "/mnt/data", "/mnt/data"),
    ("data.dir", "none", None),
    ("optim.clip_norm", "none", None),
    ("optim.clip_norm", "0.5", 0.5),
    ("optim.scale_lr", "none", "none"),
    ("model.widths", "16,32, 64", (16, 32, 64)),
    ("model.widths", "8", (8,)),
    ("optim.betas", "0.9,0.99", (0.9, 0.99)),
    ("log.trackers", "wandb, mlflow", ("wandb", "mlflow")),
    ("log.trackers", "none", None),
    ("model.options.hidden", "64", 64),
    ("model.options.slope", "0.1", 0.1),
    ("model.options.bias", "false", False),
    ("model.options.activation", "gelu", "gelu"),
    ("model.options.empty", "", ""),
]


@pytest.mark.parametrize(("path", "text", "value"), ACCEPTED_TEXT)
def test_text_becomes_a_value_of_the_fields_type(path: str, text: str, value: Any) -> None:
    result = from_text(annotation_of(path), text)
    assert result == value
    assert type(result) is type(value)


@pytest.mark.parametrize(
    ("path", "file_value", "value"),
    [
        ("model.blocks", 3, 3),
        ("optim.lr", 1, 1.0),
        ("data.augment", True, True),
        ("optim.clip_norm", "none", None),
        ("optim.clip_norm", None, None),
        ("model.widths", [16, 32], (16, 32)),
        ("optim.betas", (0.9, 1), (0.9, 1.0)),
        ("model.options.hidden", 64, 64),
        ("model.options.bias", True, True),
    ],
)
def test_a_files_value_becomes_a_value_of_the_fields_type(
    path: str, file_value: Any, value: Any
) -> None:
    result = from_value(annotation_of(path), file_value)
    assert result == value
    assert type(result) is type(value)


@pytest.mark.parametrize(
    ("path", "text", "complaint"),
    [
        ("optim.lr", "fast", "'fast' is not a number"),
        ("optim.lr", "", "'' is not a number"),
        ("optim.lr", "nan", "nan is not a finite number"),
        ("optim.lr", "inf", "inf is not a finite number"),
        ("optim.lr", "1e999", "inf is not a finite number"),
        ("optim.lr", "-1", "-1.0 must be above 0"),
        ("optim.lr", "0", "0.0 must be above 0"),
        ("optim.momentum", "1.5", "1.5 must be between 0 and 1"),
        ("optim.weight_decay", "-0.1", "-0.1 must be at least 0"),
        ("model.blocks", "2.5", "'2.5' is not a whole number"),
        ("model.blocks", "0", "0 must be at least 1"),
        ("data.augment", "maybe", "'maybe' is not true or false"),
        ("data.dir", "", "'' is empty"),
        ("data.dir", "\udcff", r"'\udcff' is not valid UTF-8 text"),
        (
            "optim.name",
            "sdg",
            "'sdg' is not one of sgd, adamw, muon, package.Class; did you mean 'sgd'?",
        ),
        (
            "optim.name",
            "SGD",
            "'SGD' is not one of sgd, adamw, muon, package.Class; did you mean 'sgd'?",
        ),
        ("optim.name", "lion", "'lion' is not one of sgd, adamw, muon, package.Class"),
        ("model.widths", "16,a", "[16, 'a'], where 'a' is not a whole number"),
        ("model.widths", "16,0", "[16, 0], where 0 must be at least 1"),
        ("optim.betas", "0.9", "[0.9] must have 2 items"),
        (
            "log.trackers",
            "wandb,mlfow",
            "['wandb', 'mlfow'], where 'mlfow' is not one of wandb, mlflow, tensorboard; did you mean 'mlflow'?",
        ),
        (
            "model.options",
            "5",
            "'5' is not a table; set its options one by one, each by its own name",
        ),
        ("model.options.slope", "nan", "nan is not a finite number"),
        ("model.options.name", "\udcff", r"'\udcff' is not valid UTF-8 text"),
    ],
)
def test_text_that_does_not_fit_is_refused(path: str, text: str, complaint: str) -> None:
    with pytest.raises(Mismatch) as refused:
        from_text(annotation_of(path), text)
    assert str(refused.value) == complaint


@pytest.mark.parametrize(
    ("path", "file_value", "complaint"),
    [
        ("optim.lr", "0.1", "'0.1' is not a number; write it without quotes"),
        ("optim.lr", True, "true is not a number"),
        ("optim.lr", None, "none is not a number"),
        ("optim.lr", 10**400, f"{10**400} is not a finite number"),
        ("model.blocks", True, "true is not a whole number"),
        ("model.blocks", 3.0, "3.0 is not a whole number"),
        ("model.blocks", "3", "'3' is not a whole number; write it without quotes"),
        ("data.augment", 1, "1 is not true or false"),
        ("data.augment", "true", "'true' is not true or false; write it without quotes"),
        ("data.name", 5, "5 is not text"),
        ("optim.name", 5, "5 is not one of sgd, adamw, muon, package.Class"),
        ("model.widths", 16, "16 is not a list"),
        ("model.widths", [], "[] must have at least 1 item"),
        ("optim.betas", [0.9, 0.95, 0.99], "[0.9, 0.95, 0.99] must have 2 items"),
        ("model.options.sizes", [1, 2], "[1, 2] is not text, a number, true or false"),
        (
            "model.options.day",
            datetime.time(1),
            "datetime.time(1, 0) is not text, a number, true or false",
        ),
        ("model.options.slope", float("inf"), "inf is not a finite number"),
    ],
)
def test_a_value_that_does_not_fit_is_refused(path: str, file_value: Any, complaint: str) -> None:
    with pytest.raises(Mismatch) as refused:
        from_value(annotation_of(path), file_value)
    assert str(refused.value) == complaint


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("model.blocks", "whole number at least 1"),
        ("optim.lr", "number above 0"),
        ("model.dropout", "number between 0 and 1"),
        ("optim.clip_norm", "number above 0, or none"),
        ("optim.name", "sgd | adamw | muon | package.Class"),
        ("model.widths", "whole numbers at least 1, with commas"),
        ("optim.betas", "2 numbers between 0 and 1, with commas"),
        ("log.trackers", "some of wandb, mlflow, tensorboard, or none"),
        ("data.augment", "true | false"),
        ("data.name", "text"),
        ("model.options", "text, number or true | false"),
        ("model.options.hidden", "text, number or true | false"),
    ],
)
def test_a_type_is_described_in_words(path: str, words: str) -> None:
    assert describe_type(annotation_of(path)) == words


def test_every_default_of_the_schema_is_a_value_its_own_field_accepts() -> None:
    checked = [
        from_value(field.annotation, field.default) == field.default
        for field in FIELDS.values()
        if not field.is_table
    ]
    assert len(checked) > 50
    assert all(checked)
