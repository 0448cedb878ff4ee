"""Dockerfiles: the variables and the command of an image, as a script."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from drumline_lint.reading.container_words import container_variable, plain_word
from drumline_lint.reading.shell import Assignment, Container, Script
from drumline_lint.reading.shell_parser import Command, Word, read_commands

NAMES = re.compile(r"(?:Docker|Container)file(?:\..+)?|.+\.(?:docker|container)file", re.IGNORECASE)
_INSTRUCTION = re.compile(
    r"^[ \t]*(?P<name>[A-Za-z]+)[ \t]+(?P<rest>(?:[^\n\\]|\\[^\n]|\\\r?\n(?:[ \t]*#[^\n]*\n)*)*)",
    re.MULTILINE,
)
_TEXT = re.compile(r'"((?:[^"\\]|\\.)*)"')
_VARIABLE = re.compile(r"""([A-Za-z_]\w*)=("(?:[^"\\]|\\.)*"|'[^']*'|(?:[^\s\\]|\\[^\r\n])*)""")
_OLD_VARIABLE = re.compile(r"([A-Za-z_]\w*)[ \t]+([^=\n]+)")


def read_dockerfile(path: Path, text: str) -> Script:
    variables: list[Assignment] = []
    entrypoint: list[Command] = []
    command: list[Command] = []
    for instruction in _INSTRUCTION.finditer(text):
        name = instruction["name"].upper()
        span = instruction.span("rest")
        if name == "FROM":  # The image is the last of its stages.
            variables.clear()
        elif name == "ENV":
            variables += _variables(text, *span)
        elif name == "ENTRYPOINT":
            entrypoint = _commands(text, *span)
        elif name == "CMD":
            command = _commands(text, *span)
    return Script(
        path,
        text,
        container=Container(kind="image", replicas=None),
        written_commands=_joined(entrypoint, command),
        environment=variables,
    )


def _joined(entrypoint: list[Command], command: list[Command]) -> list[Command]:
    """CMD is the arguments of ENTRYPOINT."""
    if not entrypoint or not command:
        return entrypoint or command
    words = (*entrypoint[-1].words, *command[0].words)
    return [*entrypoint[:-1], Command(words=words)]


def _commands(text: str, start: int, end: int) -> list[Command]:
    if not text.startswith("[", start):
        return read_commands(text, start, end)
    words = [_word(match) for match in _TEXT.finditer(text, start, end)]
    return [Command(words=tuple(words))] if words else []


def _word(match: re.Match[str]) -> Word:
    return plain_word(match[1], match.span(), match.span(1))


def _variables(text: str, start: int, end: int) -> Iterator[Assignment]:
    old = _OLD_VARIABLE.fullmatch(text[start:end].strip())
    if old is not None:
        yield container_variable(old[1], plain_word(old[2], (start, end)), (start, end))
        return
    for match in _VARIABLE.finditer(text, start, end):
        value = plain_word(match[2].strip("\"'"), match.span())
        yield container_variable(match[1], value, match.span())
