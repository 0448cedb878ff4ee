"""YAML as nodes with places. Nothing is constructed and aliases are not copied, so a hostile file
costs no more than a large one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

YamlNode: TypeAlias = Any
"""A node of PyYAML, which has no types."""

_DEEPEST = 8
_DEEPEST_WALK = 40


def documents(text: str) -> list[YamlNode]:
    """Raises ValueError for text that is not YAML."""
    # Only YAML files need it, and most runs of the linter read none. The loader in C would
    # overflow the stack on text that is nested too deeply.
    import yaml

    try:
        nodes = list(yaml.compose_all(text, Loader=yaml.SafeLoader))
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return [node for node in nodes if node is not None]


def member(node: YamlNode | None, *path: str) -> YamlNode | None:
    """The value of a key, or of a key in the value of a key; `<<` is followed."""
    for key in path:
        node = _member(node, key, 0)
    return node


def _member(node: YamlNode | None, key: str, depth: int) -> YamlNode | None:
    if depth > _DEEPEST:
        return None
    pairs = mapping(node)
    for name, value in pairs:
        if name == key:
            return value
    for name, value in pairs:
        if name == "<<":
            for merged in items(value) or [value]:
                if (inherited := _member(merged, key, depth + 1)) is not None:
                    return inherited
    return None


def mapping(node: YamlNode | None) -> list[tuple[str, YamlNode]]:
    """The keys and values of a mapping; empty for anything else."""
    if node is None or node.id != "mapping":
        return []
    return [(scalar(key) or "", value) for key, value in node.value]


def items(node: YamlNode | None) -> Sequence[YamlNode]:
    return node.value if node is not None and node.id == "sequence" else []


def scalar(node: YamlNode | None) -> str | None:
    return node.value if node is not None and node.id == "scalar" else None


def is_text(node: YamlNode) -> bool:
    """Whether a scalar is a string, or nothing."""
    return str(node.tag).rpartition(":")[2] in {"str", "null"}


def number(node: YamlNode | None) -> int | None:
    text = scalar(node) or ""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 7 else None


def span_of(node: YamlNode) -> tuple[int, int]:
    return node.start_mark.index, node.end_mark.index


def code_in(node: YamlNode, text: str) -> tuple[int, int]:
    """Where the letters of a scalar are, without quotes and without the line of its `|`."""
    start, end = span_of(node)
    style = node.style
    if style in {"|", ">"}:
        start = text.find("\n", start, end) + 1 or end
    elif style in {"'", '"'}:
        start += 1
        end -= 1
    return start, max(start, start + len(text[start:end].rstrip()))


def is_folded(node: YamlNode) -> bool:
    """Whether a line end in it is a blank."""
    return bool(node.id == "scalar" and node.style != "|")


def mappings_in(node: YamlNode) -> Iterator[YamlNode]:
    """Every mapping once, whatever aliases lead to it."""
    visited: set[int] = set()
    pending = [(node, 0)]
    while pending:
        inner, depth = pending.pop()
        if id(inner) in visited or depth > _DEEPEST_WALK:
            continue
        visited.add(id(inner))
        values = [value for _, value in mapping(inner)]
        if values:
            yield inner
        pending += [(value, depth + 1) for value in reversed([*values, *items(inner)])]
