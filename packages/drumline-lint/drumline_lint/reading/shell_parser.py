"""Splits shell text into simple commands and their words, with the position of each.

It accepts any text: an unclosed quote or bracket ends with the text, and brackets that are nested
hundreds of levels deep are not read.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


class Kind(Enum):
    """The kind of a piece of a word."""

    TEXT = "text"
    VARIABLE = "variable"
    ARRAY = "array"
    """All of an array: `${NAME[@]}`."""
    UNKNOWN = "unknown"
    """Known only at run time."""


class Piece(NamedTuple):
    """Part of a word: its text, or the name of a variable."""

    kind: Kind
    text: str = ""
    is_quoted: bool = False


@dataclass(frozen=True, slots=True)
class Word:
    """One word of a command; offsets count characters of the file's text."""

    start: int
    end: int
    pieces: tuple[Piece, ...]
    items: tuple[Word, ...] | None = None
    """For `NAME=(...)`, the words in the brackets."""

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
class Command:
    """A simple command, as it is written."""

    words: tuple[Word, ...]
    is_conditional: bool
    """Inside an if, a case or a loop, or after && or ||."""

    @property
    def start(self) -> int:
        return self.words[0].start

    @property
    def end(self) -> int:
        return self.words[-1].end


ASSIGNMENT = re.compile(r"[A-Za-z_]\w*(?:\[[^\]\s]*\])?\+?=")
_BLANKS = re.compile(r"(?:[^\S\n]|\\\r?\n)+")
_COMMENT = re.compile(r"#[^\n]*")
_BARE = re.compile(r"[^\s\\'\"$`;&|()<>]+")
_CONTINUED = re.compile(r"\\\r?\n")
_LITERAL = re.compile(r"\\(.?)|'([^']*)'?|\$'((?:[^'\\]|\\.)*)'?", re.DOTALL)
_IN_QUOTES = re.compile(r"[^\"\\$`]+|\\(?![$`\"\\\n])")
_ESCAPED_IN_QUOTES = re.compile(r"\\([$`\"\\]|\n)")
_IN_BRACES = re.compile(r"[^}\"\\$`]+|\\.?", re.DOTALL)
_UP_TO_BRACKET = re.compile(r"[^()]*([()])")
_VARIABLE = re.compile(r"\$(?:([A-Za-z_]\w*|[0-9@*#?$!-])|\{([A-Za-z_]\w*|[0-9]+)\})")
_WHOLE_ARRAY = re.compile(r"\$\{([A-Za-z_]\w*)\[[@*]\]\}")
_OPENING = re.compile(r"\$(?=\(\()|\$[({]|[<>]\(|`")
_HERE = re.compile(r"<<(-?)[ \t]*(?:'([^'\n]*)'|\"([^\"\n]*)\"|\\?([^\s;&|<>()'\"]+))")
_REDIRECTION = re.compile(r"\d*(?:&>>?|>>|>&|>\||<&|<>|<<<|<<|[<>](?!\())")
_OPERATOR = re.compile(r"&&|\|\||\|&|;;&?|;&|[;|\n]|&(?!>)")
_NO_COMMAND = re.compile(r"\)|\([ \t]*\)")
_LINE = re.compile(r"([^\n]*)\n?")

_OPEN_TESTS = {"if", "while", "until"}
_OPEN_HEADS = {"for", "select", "case"}
_CLOSE = {"fi", "done", "esac"}
_PASSED_OVER = {"then", "do", "else", "elif", "{", "}", "!"}


def read_commands(text: str, start: int = 0, end: int | None = None) -> list[Command]:
    """The commands of the text, or of a part of it; those inside `$(...)` come before the one that
    contains them."""
    reader = _Reader(text, start, len(text) if end is None else end)
    with suppress(RecursionError):
        reader.read_list()
    return reader.commands


def inside_quotes(text: str, word: Word) -> tuple[int, int] | None:
    """The part between the quotes of a word that is one quoted text."""
    quote = text[word.start : word.start + 1]
    closes = word.end - word.start >= 2 and text[word.end - 1] == quote
    if quote not in {"'", '"'} or not closes:
        return None
    inner = text[word.start + 1 : word.end - 1]
    bare = re.sub(r"\\.", "", inner, flags=re.DOTALL) if quote == '"' else inner
    return None if quote in bare else (word.start + 1, word.end - 1)


class _Reader:
    """Reads the text once; every step advances."""

    def __init__(self, text: str, start: int, end: int) -> None:
        self.text = text
        self.at = start
        self.end = end
        self.commands: list[Command] = []
        self.is_conditional = False
        self.closer = ""
        self.here: list[tuple[str, bool]] = []
        """The here-documents that begin on the next line: the delimiter of each, and whether tabs
        may precede it."""

    def read_list(self, closer: str = "") -> None:
        """Commands up to a closing bracket, or to the end."""
        is_inside = self.is_conditional
        num_open = 0
        operator = ""
        outer_closer, self.closer = self.closer, closer
        words: list[Word] = []
        is_at_end = False
        while not is_at_end:
            is_at_end = self.at >= self.end or self.text[self.at] == closer
            found = None if is_at_end else self._take(_OPERATOR)
            if is_at_end or found:
                ended_by = found[0] if found else ""
                own, num_opened = self._without_keywords(words)
                num_open = max(0, num_open + num_opened)
                if own:
                    is_conditional = is_inside or num_open > 0 or operator in {"&&", "||"}
                    self.commands.append(Command(tuple(own), is_conditional))
                if (
                    ended_by != "\n" or own or operator not in {"&&", "||", "|"}
                ):  # otherwise it continues in the next line
                    operator = ended_by
                self.is_conditional = is_inside or num_open > 0 or operator in {"&&", "||"}
                words = []
                if ended_by == "\n":
                    self._skip_here_documents()
            elif self._take(_BLANKS) or self._take(_COMMENT):
                continue
            elif found := self._take(_HERE):
                self.here.append((found[2] or found[3] or found[4] or "", bool(found[1])))
            elif self._take(_REDIRECTION):
                self._take(_BLANKS)
                self._word()  # the target of a redirection is not part of the command
            elif (word := self._word()) is not None:
                words.append(word)
            elif self._take(_NO_COMMAND):
                words = []  # a pattern of a case, or the name of a function
            elif not words and self.text.startswith("((", self.at, self.end):
                self._skip_sum()
            else:
                self.at += 1
                self.read_list(")")
        self.at = min(self.at + len(closer), self.end)
        self.is_conditional = is_inside
        self.closer = outer_closer

    def _without_keywords(self, words: list[Word]) -> tuple[list[Word], int]:
        """The command itself, and how many ifs, cases and loops it opens, minus those it closes."""
        num_opened = 0
        for position, word in enumerate(words):
            keyword = self.text[word.start : word.end] if word.end - word.start < 9 else ""
            if keyword in _OPEN_HEADS or keyword == "function":
                return [], num_opened + (keyword != "function")
            if keyword not in _OPEN_TESTS | _CLOSE | _PASSED_OVER:
                return words[position:], num_opened
            num_opened += (keyword in _OPEN_TESTS) - (keyword in _CLOSE)
        return [], num_opened

    def _word(self) -> Word | None:
        start = self.at
        pieces = list[Piece]()
        items: tuple[Word, ...] | None = None
        while self.at < self.end and self.text[self.at] != self.closer:
            if found := self._take(_BARE):
                pieces.append(Piece(Kind.TEXT, found[0]))
            elif self._take(_CONTINUED):
                continue
            elif found := self._take(_LITERAL):
                pieces.append(Piece(Kind.TEXT, found[found.lastindex or 1], True))
            elif self.text[self.at] == '"':
                self._read_quoted(pieces)
            elif self.text[self.at] in "$`" or _OPENING.match(self.text, self.at, self.end):
                self._expand(pieces, is_quoted=False)
            elif self.text[self.at] == "(" and ASSIGNMENT.fullmatch(self.text, start, self.at):
                items = self._array()
                pieces.append(Piece(Kind.UNKNOWN))
            else:
                break
        return Word(start, self.at, _joined(pieces), items) if self.at > start else None

    def _array(self) -> tuple[Word, ...]:
        words: list[Word] = []
        self.at += 1
        while self.at < self.end and self.text[self.at] != ")":
            if self._take(_BLANKS) or self._take(_COMMENT):
                continue
            if (word := self._word()) is not None:
                words.append(word)
            else:
                self.at += 1
        self.at = min(self.at + 1, self.end)
        return tuple(words)

    def _read_quoted(self, pieces: list[Piece]) -> None:
        self.at += 1
        pieces.append(Piece(Kind.TEXT, "", True))
        while self.at < self.end and self.text[self.at] != '"':
            if found := self._take(_IN_QUOTES):
                pieces.append(Piece(Kind.TEXT, found[0], True))
            elif found := self._take(_ESCAPED_IN_QUOTES):
                pieces.append(Piece(Kind.TEXT, found[1].strip("\n"), True))
            else:
                self._expand(pieces, is_quoted=True)
        self.at = min(self.at + 1, self.end)

    def _expand(self, pieces: list[Piece], *, is_quoted: bool) -> None:
        """At a `$` or a backquote, or at `<(`."""
        if found := self._take(_VARIABLE):
            pieces.append(Piece(Kind.VARIABLE, found[1] or found[2], is_quoted))
        elif found := self._take(_WHOLE_ARRAY):
            pieces.append(Piece(Kind.ARRAY, found[1], is_quoted))
        elif found := self._take(_OPENING):
            pieces.append(Piece(Kind.UNKNOWN, "", is_quoted))
            if found[0] == "$":
                self._skip_sum()
            elif found[0] == "${":
                self._skip_braces()
            else:
                self.read_list("`" if found[0] == "`" else ")")
        else:
            pieces.append(Piece(Kind.TEXT, "$", is_quoted))
            self.at += 1

    def _skip_braces(self) -> None:
        """The rest of `${NAME...}`, with the commands of `$(...)` in it."""
        while self.at < self.end and self.text[self.at] != "}":
            if self._take(_IN_BRACES):
                continue
            if self.text[self.at] == '"':
                self._read_quoted([])
            else:
                self._expand([], is_quoted=True)
        self.at = min(self.at + 1, self.end)

    def _skip_sum(self) -> None:
        """`((...))`"""
        num_open = 0
        while found := self._take(_UP_TO_BRACKET):
            num_open += 1 if found[1] == "(" else -1
            if num_open == 0:
                return
        self.at = self.end

    def _skip_here_documents(self) -> None:
        for delimiter, has_tabs in self.here:
            line = None
            while line != delimiter and self.at < self.end and (found := self._take(_LINE)):
                line = found[1].rstrip("\r")
                line = line.lstrip("\t") if has_tabs else line
        self.here = []

    def _take(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """Match a pattern and advance past it."""
        found = pattern.match(self.text, self.at, self.end)
        self.at = found.end() if found else self.at
        return found


def _joined(pieces: Sequence[Piece]) -> tuple[Piece, ...]:
    """Merge adjacent texts, quoted if any of them was; an empty text is kept only for an empty
    word."""
    joined: list[Piece] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if last is not None and last.kind is piece.kind is Kind.TEXT:
            joined[-1] = Piece(Kind.TEXT, last.text + piece.text, last.is_quoted or piece.is_quoted)
        else:
            joined.append(piece)
    return tuple(one for one in joined if one.text or one.kind is not Kind.TEXT) or tuple(
        joined[:1]
    )
