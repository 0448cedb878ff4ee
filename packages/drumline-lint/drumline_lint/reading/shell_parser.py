"""Splits shell text into simple commands and their words, with the position of each.

tree-sitter reads the text. It accepts any: what cannot be read is left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from tree_sitter import Node, Parser


class Kind(Enum):
    """The kind of a piece of a word."""

    TEXT = "text"
    VARIABLE = "variable"
    ARRAY = "array"
    """All of an array: `${NAME[@]}`."""
    UNKNOWN = "unknown"
    """Known only at run time; its text is what is written, as `$(hostname)`."""


class Piece(NamedTuple):
    """Part of a word: its text, or the name of a variable."""

    kind: Kind
    text: str = ""
    is_quoted: bool = False
    """Of a variable or an array: whether it stays one word."""


@dataclass(frozen=True, slots=True)
class Word:
    """One word of a command; offsets count characters of the file's text."""

    start: int
    end: int
    pieces: tuple[Piece, ...]
    items: tuple[Word, ...] | None = None
    """For `NAME=(...)`, the words in the brackets."""
    code: tuple[int, int] | None = None
    """In YAML or a Dockerfile, where the text of the word is, without its quotes."""

    @property
    def plain(self) -> str | None:
        """Its text, if nothing in it is expanded."""
        if any(piece.kind is not Kind.TEXT for piece in self.pieces):
            return None
        return "".join(piece.text for piece in self.pieces)

    @property
    def head(self) -> str:
        """The text at its beginning, up to the first expansion."""
        first = self.pieces[0] if self.pieces else Piece(Kind.TEXT)
        return first.text if first.kind is Kind.TEXT else ""

    def behind(self, length: int) -> Word:
        """The rest of the word after this many letters of its head."""
        first = self.pieces[0]._replace(text=self.pieces[0].text[length:])
        pieces = (
            (first, *self.pieces[1:]) if first.text or len(self.pieces) == 1 else self.pieces[1:]
        )
        return Word(self.start + length, self.end, pieces)


@dataclass(frozen=True, slots=True)
class Loop:
    """`for NAME in WORDS`; without words for other loops."""

    name: str = ""
    words: tuple[Word, ...] = ()


@dataclass(frozen=True, slots=True)
class _Around:
    """What surrounds a command."""

    is_conditional: bool = False
    """Inside an if, a case or a loop, or after && or ||."""
    is_background: bool = False
    """Started with `&`, alone or with the commands around it."""
    loop: Loop | None = None
    """The innermost loop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command(_Around):
    """A simple command, as it is written."""

    words: tuple[Word, ...]

    @property
    def start(self) -> int:
        return self.words[0].start

    @property
    def end(self) -> int:
        return self.words[-1].end


ASSIGNMENT = re.compile(r"[A-Za-z_]\w*(?:\[[^\]\s]*\])?\+?=")
_NAME = r"\$([A-Za-z_]\w*|[0-9])"
_IN_TEXT = re.compile(rf"\\(?:\r?\n|(?P<escaped>.))|{_NAME}", re.DOTALL)
_IN_QUOTES = re.compile(rf"\\(?:\r?\n|(?P<escaped>[$`\"\\]))|{_NAME}")
_VARIABLE = re.compile(r"\$(?:([@*#?$!-])|\{([A-Za-z_]\w*|[0-9]+)\})")
_WHOLE_ARRAY = re.compile(r"\$\{([A-Za-z_]\w*)\[[@*]\]\}")
_CONTINUED = re.compile(r"\\\r?\n")
# In templates, as in `DATA=<path of the data>` or `{{ path }}`; it is not valid shell.
_PLACEHOLDER = re.compile(r"(?<=[=/])<\w[^<>\n]*>|\{\{[^{}\n]*\}\}")
# The types of tree-sitter-bash's nodes.
_DECLARATIONS = {"declaration_command", "unset_command"}
_COMMANDS = {"command", "variable_assignment", "variable_assignments", *_DECLARATIONS}
_LOOPS = {"while_statement", "for_statement", "c_style_for_statement"}
_CONDITIONAL = {"if_statement", "case_statement", *_LOOPS}
_NO_WORDS = {"file_redirect", "heredoc_redirect", "herestring_redirect", "comment", "ERROR"}
_EXPANSIONS = {
    "simple_expansion",
    "expansion",
    "arithmetic_expansion",
    "command_substitution",
    "process_substitution",
    "translated_string",
    "array",
}


def read_commands(text: str, start: int = 0, end: int | None = None) -> list[Command]:
    """The commands of the text, or of a part of it; those inside `$(...)` come before the one that
    contains them."""
    end = len(text) if end is None else end
    # One byte a character, so that tree-sitter's offsets are those of the text. tree-sitter-bash
    # 0.25 ends a word at the second variable of `$A/$B.tar`, so it reads `_A/_B.tar`.
    readable = _PLACEHOLDER.sub(lambda match: "_" * len(match[0]), text[start:end])
    readable = re.sub(_NAME, r"_\1", readable)
    tree = _parser().parse(readable.encode("ascii", errors="replace"))
    reader = _Reader(text, start)
    commands = []
    pending = [(tree.root_node, _Around())]
    while pending:
        node, around = pending.pop()
        if node.type in _COMMANDS:
            commands += [reader.command(words, around) for words in reader.lines(node)]
        loop = reader.loop(node)
        inner_nodes = [*_inner_nodes(node)]
        pending += [
            (
                inner,
                _Around(
                    around.is_conditional or _is_condition(node, position),
                    around.is_background or _is_background(inner),
                    loop if loop and inner.type == "do_group" else around.loop,
                ),
            )
            for position, inner in reversed([*enumerate(inner_nodes)])
        ]
    return sorted(commands, key=lambda command: command.end)


@cache
def _parser() -> Parser:
    # Only scripts need it, and most runs of the linter read none.
    import tree_sitter_bash
    from tree_sitter import Language, Parser

    return Parser(Language(tree_sitter_bash.language()))


def _inner_nodes(node: Node) -> Iterator[Node]:
    """Where further commands may be; an assignment before a command is one of its words."""
    for child in node.named_children:
        if child.type == "variable_assignment" and node.type in _COMMANDS:
            yield from child.named_children
        elif child.type != "heredoc_body":
            yield child


def _is_condition(node: Node, position: int) -> bool:
    """Whether a node decides whether its child at this position runs."""
    return node.type in _CONDITIONAL or (node.type == "list" and position > 0)


def _is_background(node: Node) -> bool:
    return node.next_sibling is not None and node.next_sibling.type == "&"


def inside_quotes(text: str, word: Word) -> tuple[int, int] | None:
    """The part between the quotes of a word that is one quoted text."""
    if word.code is not None:
        return word.code
    quote = text[word.start : word.start + 1]
    closes = word.end - word.start >= 2 and text[word.end - 1] == quote
    if quote not in {"'", '"'} or not closes:
        return None
    inner = text[word.start + 1 : word.end - 1]
    bare = re.sub(r"\\.", "", inner, flags=re.DOTALL) if quote == '"' else inner
    return None if quote in bare else (word.start + 1, word.end - 1)


class _Reader:
    """Makes words of tree-sitter's nodes."""

    def __init__(self, text: str, offset: int) -> None:
        self.text = text
        self.offset = offset
        """Where the text that tree-sitter has read begins."""

    def lines(self, command: Node) -> Iterator[tuple[Word, ...]]:
        """The words of a command; tree-sitter takes `A=1` and the line after it for one."""
        words: list[Word] = []
        for word in self._words(command):
            if words and "\n" in _CONTINUED.sub("", self.text[words[-1].end : word.start]):
                yield tuple(words)
                words = []
            words.append(word)
        if words:
            yield tuple(words)

    def command(self, words: tuple[Word, ...], around: _Around) -> Command:
        return Command(
            words=words,
            is_conditional=around.is_conditional,
            is_background=around.is_background,
            loop=around.loop,
        )

    def loop(self, node: Node) -> Loop | None:
        if node.type not in _LOOPS:
            return None
        variable = node.child_by_field_name("variable")
        values = node.children_by_field_name("value")
        words = tuple(self._word(value) for value in values if variable)
        return Loop(self._text(variable) if variable else "", words)

    def _words(self, command: Node) -> list[Word]:
        if command.type == "variable_assignment":
            return [self._word(command)]
        # The first word of `export a=1` is a keyword, and keywords are nodes without a name.
        nodes = command.children if command.type in _DECLARATIONS else command.named_children
        return [self._word(node) for node in nodes if _is_word(node)]

    def _word(self, node: Node) -> Word:
        array = _array_of(node)
        items = None
        if array:
            items = tuple(self._word(item) for item in array.named_children if _is_word(item))
        return Word(
            self.offset + node.start_byte,
            self.offset + node.end_byte,
            _joined([*self._pieces(node)]),
            items,
        )

    def _pieces(self, node: Node) -> Iterator[Piece]:
        if node.type in {"concatenation", "command_name"}:
            for child in node.children:
                yield from self._pieces(child)
        elif node.type == "variable_assignment":
            yield from self._assignment_pieces(node)
        elif node.type == "string":
            yield from self._string_pieces(node)
        elif node.type in _EXPANSIONS:
            yield self._expansion(node, is_quoted=False)
        elif node.type == "raw_string":
            yield Piece(Kind.TEXT, self._text(node)[1:-1])
        elif node.type == "ansi_c_string":
            yield Piece(Kind.TEXT, self._text(node)[2:-1])
        else:
            yield from self._text_pieces(node.start_byte, node.end_byte, is_quoted=False)

    def _assignment_pieces(self, node: Node) -> Iterator[Piece]:
        value = node.child_by_field_name("value")
        name_end = value.start_byte if value else node.end_byte
        yield Piece(Kind.TEXT, self._slice(node.start_byte, name_end))
        if value:
            yield from self._pieces(value)

    def _string_pieces(self, node: Node) -> Iterator[Piece]:
        """The text between the expansions is not all in nodes: blanks may be missing, or be in the
        expansion after them."""
        position = node.start_byte + 1
        for child in node.named_children:
            if child.type in _EXPANSIONS:
                start = child.end_byte - len(self._expansion_text(child))
                yield from self._text_pieces(position, start, is_quoted=True)
                yield self._expansion(child, is_quoted=True)
                position = child.end_byte
        yield from self._text_pieces(position, node.end_byte - 1, is_quoted=True)

    def _text_pieces(self, start: int, end: int, *, is_quoted: bool) -> Iterator[Piece]:
        text = self._slice(start, end)
        position = 0
        for match in (_IN_QUOTES if is_quoted else _IN_TEXT).finditer(text):
            yield Piece(Kind.TEXT, text[position : match.start()] + (match["escaped"] or ""))
            if variable := match[2]:
                yield Piece(Kind.VARIABLE, variable, is_quoted)
            position = match.end()
        yield Piece(Kind.TEXT, text[position:])

    def _expansion_text(self, node: Node) -> str:
        text = self._text(node)
        opening = re.search(r"[$`<>]", text)
        return text[opening.start() :] if opening else text

    def _expansion(self, node: Node, *, is_quoted: bool) -> Piece:
        text = self._expansion_text(node)
        if variable := _VARIABLE.fullmatch(text):
            return Piece(Kind.VARIABLE, variable[1] or variable[2], is_quoted)
        if array := _WHOLE_ARRAY.fullmatch(text):
            return Piece(Kind.ARRAY, array[1], is_quoted)
        return Piece(Kind.UNKNOWN, text, is_quoted)

    def _text(self, node: Node) -> str:
        return self._slice(node.start_byte, node.end_byte)

    def _slice(self, start: int, end: int) -> str:
        return self.text[self.offset + start : self.offset + end]


def _is_word(node: Node) -> bool:
    return node.type not in _NO_WORDS and node.start_byte < node.end_byte


def _array_of(node: Node) -> Node | None:
    """The array that an assignment gives its name."""
    value = node.child_by_field_name("value") if node.type == "variable_assignment" else None
    return value if value and value.type == "array" else None


def _joined(pieces: Sequence[Piece]) -> tuple[Piece, ...]:
    """Merge adjacent texts; an empty text is kept only for an empty word."""
    joined: list[Piece] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if last is not None and last.kind is piece.kind is Kind.TEXT:
            joined[-1] = Piece(Kind.TEXT, last.text + piece.text)
        else:
            joined.append(piece)
    return tuple(filter(_is_something, joined)) or tuple(joined[:1])


def _is_something(piece: Piece) -> bool:
    return bool(piece.text) or piece.kind is not Kind.TEXT
