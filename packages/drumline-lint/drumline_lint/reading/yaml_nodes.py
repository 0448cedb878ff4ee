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
    """The value of a key, or of a key in the value of a key."""
    for key in path:
        node = dict(mapping(node)).get(key)
    return node


def mapping(node: YamlNode | None, depth: int = 0) -> list[tuple[str, YamlNode]]:
    """The keys and values of a mapping, with those of `<<` that it does not replace; empty for
    anything else."""
    if node is None or node.id != "mapping" or depth > _DEEPEST:
        return []

    pairs = {scalar(key) or "": value for key, value in node.value}
    merged = pairs.pop("<<", None)
    inherited: dict[str, YamlNode] = {}

    for base in items(merged) or [merged]:
        inherited = dict(mapping(base, depth + 1)) | inherited

    return list((inherited | pairs).items())


def merged(node: YamlNode) -> list[YamlNode]:
    """What the `<<` of a mapping names, which only brings the keys that the mapping does not have."""
    bases = [value for key, value in node.value if scalar(key) == "<<"]
    return [base for value in bases for base in items(value) or [value]]


def items(node: YamlNode | None) -> Sequence[YamlNode]:
    """The items of a list; empty for anything else."""
    return node.value if node is not None and node.id == "sequence" else []


def scalar(node: YamlNode | None) -> str | None:
    """The text of a string or a number; None for anything else."""
    return node.value if node is not None and node.id == "scalar" else None


def text_at(node: YamlNode | None, *path: str) -> str:
    """The scalar at the end of a path; empty if there is none."""
    return scalar(member(node, *path)) or ""


def is_text(node: YamlNode) -> bool:
    """Whether a scalar is a string, or nothing."""
    return str(node.tag).rpartition(":")[2] in {"str", "null"}


def code_in(node: YamlNode, text: str) -> tuple[int, int]:
    """Where the letters of a scalar are, without quotes and without the line of its `|`."""
    start = node.start_mark.index
    end = node.end_mark.index

    if node.style in {"|", ">"}:
        start = text.find("\n", start, end) + 1 or end
    elif node.style in {"'", '"'}:
        start += 1
        end -= 1

    return start, start + len(text[start:end].rstrip())


def mappings_in(node: YamlNode) -> Iterator[YamlNode]:
    """Every mapping once, whatever aliases lead to it."""
    visited: set[int] = set()
    pending = [(node, 0)]

    while pending:
        inner, depth = pending.pop()
        if id(inner) in visited or depth > _DEEPEST_WALK:
            continue
        visited.add(id(inner))

        values = [value for _, value in inner.value] if inner.id == "mapping" else []
        if values:
            yield inner
        pending += [(value, depth + 1) for value in reversed([*values, *items(inner)])]
