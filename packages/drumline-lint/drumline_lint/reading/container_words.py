"""Words, commands and variables of containers, which YAML and Dockerfiles write without a shell."""

from __future__ import annotations

import re
from collections.abc import Iterator

from drumline_lint.reading.shell import Assignment
from drumline_lint.reading.shell_parser import Command, Kind, Piece, Word

# Kubernetes expands `$(NAME)`; Compose `$NAME` and `${NAME:-1}`, from the shell that starts it.
_KUBERNETES = re.compile(r"\$\((?P<name>[A-Za-z_]\w*)\)")
_COMPOSE = re.compile(r"\$(?:[A-Za-z_]\w*|\{[^{}]*\})")
Span = tuple[int, int]


def kubernetes_word(text: str, span: Span, code: Span | None = None) -> Word:
    return Word(*span, tuple(_pieces(text, _KUBERNETES)), code=code)


def compose_word(text: str, span: Span, code: Span | None = None) -> Word:
    return Word(*span, tuple(_pieces(text, _COMPOSE)), code=code)


def plain_word(text: str, span: Span, code: Span | None = None) -> Word:
    return Word(*span, (Piece(Kind.TEXT, text),), code=code)


def _pieces(text: str, expansion: re.Pattern[str]) -> Iterator[Piece]:
    position = 0
    for match in expansion.finditer(text):
        if match.start() > position:
            yield Piece(Kind.TEXT, text[position : match.start()])
        name = match.groupdict().get("name")
        yield Piece(Kind.VARIABLE, name, True) if name else Piece(Kind.UNKNOWN, match[0], True)
        position = match.end()
    if position < len(text) or not text:
        yield Piece(Kind.TEXT, text[position:])


def container_variable(name: str, value: Word, span: Span) -> Assignment:
    """A variable that a container is started with."""
    return Assignment(
        name=name,
        value=value,
        command=Command(words=(value,)),
        is_exported=True,
        is_for_command=False,
        is_appended=False,
        items=None,
        start=span[0],
        end=span[1],
    )
