"""Writes manifests as YAML: mappings and lists in blocks, every string in JSON's quotes, which YAML reads the same.

No library for forty lines: what is written here is ours, and nothing is read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

PLAIN_KEY = re.compile(r"[A-Za-z][A-Za-z0-9./_-]*")


def to_yaml(documents: Sequence[Mapping[str, Any]], *, comments: Sequence[str] = ()) -> str:
    """The documents, one below the other, under the comments."""
    head = "".join(f"# {line}\n" for line in comments)
    return head + "---\n".join("".join(f"{line}\n" for line in _lines(document)) for document in documents)


def _lines(value: Mapping[str, Any] | Sequence[Any]) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            name = key if PLAIN_KEY.fullmatch(key) else json.dumps(key)
            if _is_block(item):
                yield f"{name}:"
                yield from (f"  {line}" for line in _lines(item))
            else:
                yield f"{name}: {_scalar(item)}"
    else:
        for item in value:
            first, *rest = _lines(item) if _is_block(item) else [_scalar(item)]
            yield f"- {first}"
            yield from (f"  {line}" for line in rest)


def _is_block(value: Any) -> bool:
    return isinstance(value, Mapping | list) and bool(value)


def _scalar(value: Any) -> str:
    """A string, number, true, false or nothing; an empty mapping or list too."""
    return json.dumps(value)
