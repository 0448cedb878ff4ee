"""What another process wrote is read as it was, or refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, TypedDict

import pytest

from drumline.base.untrusted import from_json


class Color(StrEnum):
    RED = "red"


@dataclass(frozen=True)
class Leaf:
    name: str
    sizes: tuple[tuple[int, ...], ...] = ()
    color: Color = Color.RED


@dataclass(frozen=True)
class Tree:
    leaves: tuple[Leaf, ...]
    ages: Mapping[int, float]
    pair: tuple[str, int] = ("a", 1)
    number: int | None = None
    is_old: bool = False
    free: Mapping[str, Any] = field(default_factory=dict)


class Note(TypedDict):
    text: str
    ranks: list[int]


TREE = Tree((Leaf("x", ((1, 2), ())),), {3: 0.5}, ("b", 2), 7, True, {"any": [None]})


def test_what_was_written_is_read() -> None:
    assert from_json(Tree, json.loads(json.dumps(asdict(TREE)))) == TREE
    assert from_json(Tree, {"leaves": [], "ages": {"1": 2}}) == Tree((), {1: 2}), (
        "defaults; an int is a float, too"
    )
    assert from_json(Note, {"text": "", "ranks": [1], "more": None}) == {
        "text": "",
        "ranks": [1],
    }, "what a later version has added is left out"


@pytest.mark.parametrize(
    "change",
    [
        {"leaves": None},
        {"leaves": "text"},
        {"leaves": [{"name": 7}]},
        {"leaves": [{"name": "x", "color": "blue"}]},
        {"ages": {"x": 1.0}},
        {"ages": {"1": "2"}},
        {"ages": []},
        {"pair": ["a"]},
        {"pair": ["a", "b"]},
        {"number": True},
        {"number": 1.5},
        {"is_old": 1},
    ],
)
def test_anything_else_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        from_json(Tree, {**asdict(TREE), **change})


def test_a_field_that_is_missing_is_refused() -> None:
    with pytest.raises(ValueError, match="missing"):
        from_json(Tree, {"leaves": []})
    with pytest.raises(ValueError, match="ranks"):
        from_json(Note, {"text": ""})
