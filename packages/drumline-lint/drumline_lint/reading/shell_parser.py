"""Splits shell text into simple commands and their words, with the place of each.

tree-sitter reads the text. It accepts any: what cannot be read is left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tree_sitter import Node, Parser

# What the shell replaces: `$NAME`, `$(...)`, a backquote.
_EXPANSION = re.compile(r"(?<!\\)[$`]")
# `$NAME`, `${NAME}`, `${NAME:-1}` and `${NAME:?message}`.
_VARIABLE = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)(?::?[-=?][^{}]*)?\})")


@dataclass(frozen=True, slots=True)
class Word:
    """One word of a command; offsets count characters of the file's text.

    In `echo "a $B"` the second has the text `a $B`, no plain text, and the head `a `.
    """

    start: int
    end: int
    text: str = ""
    """Without its quotes. `$NAME` and `$(...)` are left; a dollar sign that expands nothing is `\\$`."""
    items: tuple[Word, ...] | None = None
    """For `NAME=(...)`, the words in the brackets."""
    code: tuple[int, int] | None = None
    """In YAML or a Dockerfile, where the text of the word is, without its quotes."""

    @property
    def plain(self) -> str | None:
        """Its text, if nothing in it is expanded."""
        return None if _EXPANSION.search(self.text) else self.text.replace("\\$", "$")

    @property
    def head(self) -> str:
        """The text before the first expansion."""
        return _EXPANSION.split(self.text, maxsplit=1)[0]

    @property
    def variable(self) -> str:
        """The variable that is all of the word, as in `${NAME:-1}`; empty for other words."""
        name = _VARIABLE.fullmatch(self.text)

        return (name[1] or name[2]) if name else ""

    def behind(self, length: int) -> Word:
        """The rest of the word after this many letters."""
        return Word(self.start + length, self.end, self.text[length:], self.items)


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a command is inside of."""

    is_conditional: bool = False
    """Inside an if, a case or a loop, or after && or ||."""
    is_background: bool = False
    """Started with `&`, alone or with the commands around it."""
    loop: str = ""
    """The variable of the innermost `for`, or the keyword of another loop."""


@dataclass(frozen=True, eq=False, slots=True)
class Command:
    """A simple command, as it is written: `A=1 torchrun train.py`, `export A=1`, `A=1`."""

    words: tuple[Word, ...]
    around: Surroundings = Surroundings()

    @property
    def is_conditional(self) -> bool:
        return self.around.is_conditional

    @property
    def is_background(self) -> bool:
        return self.around.is_background

    @property
    def loop(self) -> str:
        return self.around.loop

    @property
    def start(self) -> int:
        return self.words[0].start

    @property
    def end(self) -> int:
        return self.words[-1].end


# The beginning of `NAME=value`, `NAME+=value` and `NAME[0]=value`.
ASSIGNMENT = re.compile(r"[A-Za-z_]\w*(?:\[[^\]\s]*\])?\+?=")
_NAME = re.compile(r"\$([A-Za-z_]\w*|[0-9])")
# In templates, as in `DATA=<path of the data>` or `{{ path }}`; it is not valid shell.
_PLACEHOLDER = re.compile(r"(?<=[=/])<\w[^<>\n]*>|\{\{[^{}\n]*\}\}")
# `\\$(hostname)` in double quotes, which the inner shell replaces: one word for this reader.
_LATE_SUBSTITUTION = re.compile(r"\\\$\((?:[^()'\"\\]|\\.|'[^'\n]*')*\)")
# A variable of the outer shell in quoted code: `'cd '"$WORK"' && run'`.
_SPLICED = re.compile(r"'(?:\"\$\{?\w+\}?\"|\$\{?\w+\}?)'")
# A line that goes on; a backslash and what it escapes, outside of double quotes and inside.
_CONTINUED = re.compile(r"\\\r?\n")
_ESCAPED = re.compile(r"\\(?:\r?\n|(.))", re.DOTALL)
_ESCAPED_IN_QUOTES = re.compile(r"\\(?:\r?\n|([`\"\\]))")
# The types of tree-sitter-bash's nodes.
_DECLARATIONS = {"declaration_command", "unset_command"}
_COMMANDS = {"command", "variable_assignment", "variable_assignments", *_DECLARATIONS}
_LOOPS = {"while_statement", "for_statement", "c_style_for_statement"}
_CONDITIONAL = {"if_statement", "case_statement", *_LOOPS}
_NO_WORDS = {"file_redirect", "heredoc_redirect", "herestring_redirect", "comment", "ERROR"}
_NO_COMMANDS = {"heredoc_body", "command_substitution", "process_substitution"}
_PARTS = {"concatenation", "command_name", "variable_assignment"}
_EXPANSIONS = {
    "simple_expansion",
    "expansion",
    "arithmetic_expansion",
    "command_substitution",
    "process_substitution",
}


def read_commands(text: str, start: int = 0, end: int | None = None) -> list[Command]:
    """The commands of the text, or of a part of it, without those in `$(...)`.

    `cd /work && torchrun train.py &` has two, both in the background; the second is conditional.
    """
    end = len(text) if end is None else end

    # One byte a character, so that tree-sitter's offsets are those of the text. tree-sitter-bash
    # 0.25 ends a word at the second variable of `$A/$B.tar`, so it reads `_A/_B.tar`.
    readable = _PLACEHOLDER.sub(lambda match: "_" * len(match[0]), text[start:end])
    readable = _LATE_SUBSTITUTION.sub(lambda match: "_" * len(match[0]), readable)
    readable = _NAME.sub(r"_\1", readable)
    tree = _parser().parse(readable.encode("ascii", errors="replace"))

    reader = _Reader(text, start)
    commands = []
    pending = [(tree.root_node, Surroundings())]
    while pending:
        node, around = pending.pop()
        if node.type in _COMMANDS:
            commands += [Command(words, around) for words in reader.lines(node)]
        else:
            pending += reader.inner_nodes(node, around)

    return sorted(commands, key=lambda command: command.end)


@cache
def _parser() -> Parser:
    # Only scripts need it, and most runs of the linter read none.
    import tree_sitter_bash
    from tree_sitter import Language, Parser

    return Parser(Language(tree_sitter_bash.language()))


class _Reader:
    """Makes words of tree-sitter's nodes."""

    def __init__(self, text: str, offset: int) -> None:
        self._text = text
        self._offset = offset
        """Where the text that tree-sitter has read begins."""

    def inner_nodes(self, node: Node, around: Surroundings) -> Iterator[tuple[Node, Surroundings]]:
        """Where further commands may be."""
        loop = self._loop(node)

        for position, inner in enumerate(node.named_children):
            if inner.type in _NO_COMMANDS:
                continue

            is_after_another = node.type == "list" and position > 0
            is_conditional = node.type in _CONDITIONAL or is_after_another
            following = inner.next_sibling
            is_background = following is not None and following.type == "&"

            surroundings = Surroundings(
                around.is_conditional or is_conditional,
                around.is_background or is_background,
                loop if loop and inner.type == "do_group" else around.loop,
            )
            yield inner, surroundings

    def _loop(self, node: Node) -> str:
        """The variable of a `for`, or the keyword of another loop; empty for other nodes."""
        if node.type not in _LOOPS:
            return ""
        variable = node.child_by_field_name("variable")
        return str(node.children[0].type) if variable is None else self._written(variable)

    def lines(self, command: Node) -> Iterator[tuple[Word, ...]]:
        """The words of a command; tree-sitter takes `A=1` and the line after it for one."""
        words: list[Word] = []
        for word in self._words(command):
            if words and "\n" in _CONTINUED.sub("", self._text[words[-1].end : word.start]):
                yield tuple(words)
                words = []
            words.append(word)

        if words:
            yield tuple(words)

    def _words(self, command: Node) -> list[Word]:
        """The words of a command as tree-sitter has it."""
        if command.type == "variable_assignment":
            return [self._word(command)]

        # The first word of `export a=1` is a keyword, and keywords are nodes without a name.
        nodes = command.children if command.type in _DECLARATIONS else command.named_children
        return [self._word(node) for node in nodes if _is_word(node)]

    def _word(self, node: Node) -> Word:
        """A word, with its place in the whole text."""
        start = self._offset + node.start_byte
        end = self._offset + node.end_byte
        return Word(start, end, self._unquoted(node), self._array(node))

    def _array(self, node: Node) -> tuple[Word, ...] | None:
        """The words in the brackets of `NAME=(...)`."""
        value = node.child_by_field_name("value") if node.type == "variable_assignment" else None
        if value is None or value.type != "array":
            return None
        return tuple(self._word(item) for item in value.named_children if _is_word(item))

    def _unquoted(self, node: Node) -> str:
        """The text of a word, or of a part of one, as the shell understands it."""
        written = self._written(node)
        if node.type in _PARTS and node.children:
            return "".join(self._unquoted(child) for child in node.children)

        if node.type == "string":
            return _ESCAPED_IN_QUOTES.sub(r"\1", written[1:-1])
        if node.type in {"raw_string", "ansi_c_string"}:
            return written.lstrip("$")[1:-1].replace("$", "\\$")

        if node.type in _EXPANSIONS:
            return written

        return _ESCAPED.sub(_unescaped, written)

    def _written(self, node: Node) -> str:
        """The text of a node, with its quotes."""
        return self._text[self._offset + node.start_byte : self._offset + node.end_byte]


def _unescaped(escaped: re.Match[str]) -> str:
    """The letter behind a backslash; an escaped dollar sign keeps it, as it expands nothing."""
    return "\\$" if escaped[1] == "$" else escaped[1] or ""


def _is_word(node: Node) -> bool:
    """Whether it is no redirection, no comment, and not empty."""
    return node.type not in _NO_WORDS and node.start_byte < node.end_byte


def inside_quotes(text: str, word: Word) -> tuple[int, int] | None:
    """The part between the quotes of a word that is one quoted text, also with variables of the
    outer shell in it: `'cd '"$WORK"' && run'`."""
    if word.code is not None:
        return word.code

    quote = text[word.start : word.start + 1]
    is_closed = word.end - word.start >= 2 and text[word.end - 1] == quote
    if quote not in {"'", '"'} or not is_closed:
        return None

    inside = (word.start + 1, word.end - 1)
    code = _SPLICED.sub("", text[slice(*inside)])
    if quote == '"':
        code = re.sub(r"\\.", "", code, flags=re.DOTALL)

    return None if quote in code else inside
