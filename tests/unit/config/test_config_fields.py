"""The table of fields mirrors the schema, whole and in order."""

from __future__ import annotations

import dataclasses
from operator import attrgetter

from drumline.config.fields import FIELDS, SECTIONS, annotation_of
from drumline.config.help import field_docs
from drumline.config.schema import Config


def test_the_table_holds_every_field_of_the_schema_in_its_order() -> None:
    expected = [
        f"{section.name}.{field.name}"
        for section in dataclasses.fields(Config)
        if section.name != "task"
        for field in dataclasses.fields(SECTIONS[section.name])
    ]
    assert len(expected) > 50
    assert list(FIELDS) == expected


def test_the_sections_are_those_the_issue_names() -> None:
    assert list(SECTIONS) == [
        "model",
        "data",
        "optim",
        "train",
        "dist",
        "checkpoint",
        "watch",
        "log",
    ]


def test_the_defaults_are_those_of_an_empty_config() -> None:
    assert {path: field.default for path, field in FIELDS.items()} == {
        path: attrgetter(path)(Config()) for path in FIELDS
    }


def test_options_are_tables() -> None:
    assert [path for path, field in FIELDS.items() if field.is_table] == [
        "model.options",
        "optim.options",
    ]


def test_a_path_that_is_no_setting_has_no_type() -> None:
    assert annotation_of("optim.learning_rate") is None
    assert annotation_of("optim.lr.inner") is None
    assert annotation_of("model.options.anything") is not None


def test_every_field_has_a_doc_and_every_doc_a_field() -> None:
    texts = field_docs()
    assert list(texts) == list(FIELDS)
    assert all(texts.values())
    assert texts["optim.lr"] == "Peak learning rate."
    assert "\n" not in texts["data.name"]  # written over two lines in the schema
