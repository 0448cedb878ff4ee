"""Splits shell text into simple commands and their words, with the position of each.

It accepts any text: what is not closed ends with the text. It reads the text once, and keeps nesting in a list of its
own, so that no depth of brackets is too deep.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple


class Kind(Enum):
    """Of a piece of a word."""

    TEXT = "text"
    VARIABLE = "variable"
    ARRAY = "array"
    """All of an array: `${NAME[@]}`."""
    UNKNOWN = "unknown"
    """What only a run could tell."""


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

    @property
    def plain(self) -> str | None:
        """Its text, if nothing in it is expanded."""
        if any(piece.kind is not Kind.TEXT for piece in self.pieces):
            return None
        return "".join(piece.text for piece in self.pieces)

    @property
    def head(self) -> str:
        """The text that it begins with, up to the first thing that is expanded."""
        first = self.pieces[0] if self.pieces else Piece(Kind.TEXT)
        return first.text if first.kind is Kind.TEXT else ""


@dataclass(frozen=True, slots=True)
class Command:
    """A simple command, as it stands."""

    words: tuple[Word, ...]
    after: str
    """The operator before it: `&&`, `||`, `|`, `&`, `;`, a line's end, or nothing."""
    is_conditional: bool
    """Inside an if, a case or a loop, or after && or ||."""
    arrays: Mapping[int, Sequence[Word]]
    """The words of `NAME=(...)`, by where the assignment begins."""

    @property
    def start(self) -> int:
        return self.words[0].start

    @property
    def end(self) -> int:
        return self.words[-1].end


class Nesting(Enum):
    """What the text is part of."""

    LIST = "commands"
    ARRAY = "words of an array"
    QUOTES = "double quotes"
    BRACES = "${...}"
    SUM = "((...))"


@dataclass(slots=True)
class Frame:
    """One level of nesting."""

    place: Nesting
    closer: str = ""
    words: list[Word] = field(default_factory=list)
    start: int = -1
    """Of the open word; -1 when none is open."""
    pieces: list[Piece] = field(default_factory=list)
    is_target: bool = False
    """The next word is what a redirection goes to."""
    after: str = ""
    depth: int = 0
    is_conditional: bool = False
    arrays: dict[int, list[Word]] = field(default_factory=dict)
    brackets: int = 0
    outer: Frame | None = None
    """The level whose word this one is part of; none of a level that has words of its own."""

    @property
    def host(self) -> Frame:
        return self.outer or self


def joined_pieces(pieces: Sequence[Piece]) -> tuple[Piece, ...]:
    """Texts that follow each other made one, quoted if any of them was; an empty one stands only for an empty word."""
    joined: list[Piece] = []
    run: list[Piece] = []
    for piece in [*pieces, Piece(Kind.UNKNOWN)]:
        if piece.kind is Kind.TEXT:
            run.append(piece)
            continue
        text = "".join(part.text for part in run)
        if text or (run and len(run) == len(pieces)):
            joined.append(Piece(Kind.TEXT, text, any(part.is_quoted for part in run)))
        run = []
        joined.append(piece)
    return tuple(joined[:-1])


ASSIGNMENT = re.compile(r"[A-Za-z_]\w*(?:\[[^\]\s]*\])?\+?=")
_BARE = re.compile(r"[^\s\\'\"$`#;&|()<>]+")
_IN_QUOTES = re.compile(r"[^\"\\$`]+")
_IN_BRACES = re.compile(r"[^}\"\\$`']+")
_IN_SUM = re.compile(r"[^()]+")
_ANSI_QUOTED = re.compile(r"\$'((?:[^'\\]|\\.)*)'?", re.DOTALL)
_NAME = re.compile(r"\$(?:([A-Za-z_]\w*|[0-9@*#?$!-])|\{([A-Za-z_]\w*|[0-9]+)\})")
_WHOLE_ARRAY = re.compile(r"\$\{([A-Za-z_]\w*)\[[@*]\]\}")
_HERE = re.compile(r"<<(-?)[ \t]*(?:'([^'\n]*)'|\"([^\"\n]*)\"|\\?([^\s;&|<>()'\"]+))")
_REDIRECTION = re.compile(r"&>>?|>>|>&|>\||<&|<>|<<<|<<|<(?!\()|>(?!\()")
_OPERATOR = re.compile(r"&&|\|\||\|&|;;&?|;&|[;&|]")
_NO_ARGUMENTS = re.compile(r"\([ \t]*\)")
_LINE = re.compile(r"[^\n]*")

_OPEN_TESTS = {"if", "while", "until"}
_OPEN_HEADS = {"for", "select", "case"}
_CLOSE = {"fi", "done", "esac"}
_PASSED_OVER = {"then", "do", "else", "elif", "{", "}", "!"}


def read_commands(text: str, start: int = 0, end: int | None = None) -> list[Command]:
    """Of the text, or of a part of it; those inside `$(...)` come before the one that they are in."""
    return _Reader(text, start, len(text) if end is None else end).read()


def read_comments(text: str) -> frozenset[int]:
    """Where comments begin; a `#` in quotes or in a here-document begins none."""
    reader = _Reader(text, 0, len(text))
    reader.read()
    return frozenset(reader.comments)


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
    """Goes through the text; every step moves on."""

    def __init__(self, text: str, start: int, end: int) -> None:
        self.text, self.at, self.end = text, start, end
        self.commands: list[Command] = []
        self.comments: list[int] = []
        self.frames = [Frame(Nesting.LIST)]
        self.here: list[tuple[str, bool]] = []

    def read(self) -> list[Command]:
        steps = {
            Nesting.LIST: self._step_in_list,
            Nesting.ARRAY: self._step_in_list,
            Nesting.QUOTES: self._step_in_quotes,
            Nesting.BRACES: self._step_in_braces,
            Nesting.SUM: self._step_in_sum,
        }
        while self.at < self.end:
            steps[self.frames[-1].place]()
        while len(self.frames) > 1:
            self._close()
        self._end_command("")
        return self.commands

    def _step_in_list(self) -> None:
        letter, frame = self.text[self.at], self.frames[-1]
        if found := _BARE.match(self.text, self.at, self.end):
            self._add(Piece(Kind.TEXT, found.group()), found.end())
        elif letter == "\n":
            self._end_line(frame)
        elif letter.isspace():
            self._end_word()
            self.at += 1
        elif letter == "#" and frame.start < 0:
            self.comments.append(self.at)
            self.at = self._match(_LINE)
        elif letter == "#":
            self._add(Piece(Kind.TEXT, "#"), self.at + 1)
        elif letter == "\\":
            self._escape()
        elif letter == "'":
            close = self.text.find("'", self.at + 1, self.end)
            close = self.end if close < 0 else close
            self._add(Piece(Kind.TEXT, self.text[self.at + 1 : close], True), min(close + 1, self.end))
        elif letter == '"':
            self._open(Frame(Nesting.QUOTES))
        elif letter in "$`":
            self._expand(is_quoted=False)
        elif letter in "<>&|;":
            self._operator()
        else:
            self._bracket(letter)

    def _step_in_quotes(self) -> None:
        letter = self.text[self.at]
        if found := _IN_QUOTES.match(self.text, self.at, self.end):
            self._add(Piece(Kind.TEXT, found.group(), True), found.end())
        elif letter == '"':
            self._add(Piece(Kind.TEXT, "", True), self.at + 1)
            self.frames.pop()
        elif letter == "\\":
            escaped = self.text[self.at + 1 : min(self.at + 2, self.end)]
            kept = "" if escaped == "\n" else escaped if escaped in '$`"\\' else "\\" + escaped
            self._add(Piece(Kind.TEXT, kept, True), min(self.at + 2, self.end))
        else:
            self._expand(is_quoted=True)

    def _step_in_braces(self) -> None:
        letter = self.text[self.at]
        if found := _IN_BRACES.match(self.text, self.at, self.end):
            self.at = found.end()
        elif letter == "}":
            self.at += 1
            self.frames.pop()
        elif letter == '"':
            self._open(Frame(Nesting.QUOTES))
        elif letter in "$`":
            self._expand(is_quoted=True)
        else:
            self.at = min(self.at + (2 if letter == "\\" else 1), self.end)

    def _step_in_sum(self) -> None:
        frame, letter = self.frames[-1], self.text[self.at]
        if found := _IN_SUM.match(self.text, self.at, self.end):
            self.at = found.end()
            return
        frame.brackets += 1 if letter == "(" else -1
        self.at += 1
        if frame.brackets <= 0:
            self.frames.pop()

    def _expand(self, *, is_quoted: bool) -> None:
        """At a `$` or a backquote."""
        if self.text[self.at] == "`":
            self._backquote()
        elif found := _NAME.match(self.text, self.at, self.end):
            self._add(Piece(Kind.VARIABLE, found[1] or found[2], is_quoted), found.end())
        elif found := _WHOLE_ARRAY.match(self.text, self.at, self.end):
            self._add(Piece(Kind.ARRAY, found[1], is_quoted), found.end())
        elif self._is_next("$(("):
            self._add(Piece(Kind.UNKNOWN), self.at + 1)
            self._push(Frame(Nesting.SUM))
        elif self._is_next("$("):
            self._open(Frame(Nesting.LIST, closer=")"), width=2)
        elif self._is_next("${"):
            self._open(Frame(Nesting.BRACES), width=2)
        elif not is_quoted and (found := _ANSI_QUOTED.match(self.text, self.at, self.end)):
            self._add(Piece(Kind.TEXT, found[1], True), found.end())
        else:
            self._add(Piece(Kind.TEXT, "$", is_quoted), self.at + 1)

    def _backquote(self) -> None:
        if self.frames[-1].closer == "`":
            self._close()
            self.at += 1
        else:
            self._open(Frame(Nesting.LIST, closer="`"))

    def _operator(self) -> None:
        frame = self.frames[-1]
        if self._is_next("<(") or self._is_next(">("):
            self._open(Frame(Nesting.LIST, closer=")"), width=2)
        elif not self._is_next("<<<") and (found := _HERE.match(self.text, self.at, self.end)):
            self._end_word()
            self.here.append((found[2] or found[3] or found[4] or "", bool(found[1])))
            self.at = found.end()
        elif found := _REDIRECTION.match(self.text, self.at, self.end):
            if frame.start >= 0 and self.text[frame.start : self.at].isdigit():
                frame.start, frame.pieces = -1, []
            self._end_word()
            frame.is_target = True
            self.at = found.end()
        elif found := _OPERATOR.match(self.text, self.at, self.end):
            self._end_command(found.group())
            self.at = found.end()
        else:
            self.at += 1

    def _bracket(self, letter: str) -> None:
        frame = self.frames[-1]
        if letter == ")":
            self._closing_bracket(frame)
        elif frame.start >= 0 and ASSIGNMENT.fullmatch(self.text, frame.start, self.at):
            self._open(Frame(Nesting.ARRAY, closer=")"))
        elif found := _NO_ARGUMENTS.match(self.text, self.at, self.end):
            self._drop_words()
            self.at = found.end()
        elif not frame.words and frame.start < 0 and self._is_next("(("):
            self._push(Frame(Nesting.SUM))
        else:
            self._end_word()
            conditional = self._is_conditional(frame)
            self._push(Frame(Nesting.LIST, closer=")", after=frame.after, is_conditional=conditional))
            self.at += 1

    def _closing_bracket(self, frame: Frame) -> None:
        """Of `(...)`, or of a pattern of a case, which is no command."""
        if frame.closer == ")":
            self._close()
        else:
            self._drop_words()
        self.at += 1

    def _open(self, frame: Frame, width: int = 1) -> None:
        holder = self.frames[-1]
        host = self.frames[-1].host
        if host.start < 0:
            host.start = self.at
        if frame.place is not Nesting.QUOTES:
            host.pieces.append(Piece(Kind.UNKNOWN, "", holder.place is not Nesting.LIST))
        frame.is_conditional = self._is_conditional(host)
        self._push(frame)
        self.at += width

    def _close(self) -> None:
        """Ends the innermost level; the words of an array go to the assignment before it."""
        frame = self.frames[-1]
        if frame.place is Nesting.ARRAY:
            self._end_word()
            self.frames.pop()
            host = self.frames[-1].host
            host.arrays[host.start] = frame.words
            return
        if frame.place is Nesting.LIST:
            self._end_command("")
        self.frames.pop()

    def _push(self, frame: Frame) -> None:
        if frame.place not in {Nesting.LIST, Nesting.ARRAY}:
            frame.outer = self.frames[-1].host
        self.frames.append(frame)

    def _add(self, piece: Piece, end: int) -> None:
        host = self.frames[-1].host
        if host.start < 0:
            host.start = self.at
        host.pieces.append(piece)
        self.at = end

    def _escape(self) -> None:
        """A backslash outside quotes: a line goes on, or a letter is meant as it is."""
        for ending in ("\\\r\n", "\\\n"):
            if self._is_next(ending):
                self.at += len(ending)
                return
        self._add(
            Piece(Kind.TEXT, self.text[self.at + 1 : min(self.at + 2, self.end)], True), min(self.at + 2, self.end)
        )

    def _end_line(self, frame: Frame) -> None:
        if frame.place is Nesting.ARRAY:
            self._end_word()
        else:
            self._end_command("\n")
        self.at += 1
        for delimiter, has_tabs in self.here:
            self._skip_here(delimiter, has_tabs)
        self.here = []

    def _skip_here(self, delimiter: str, has_tabs: bool) -> None:
        while self.at < self.end:
            stop = self._match(_LINE)
            line = self.text[self.at : stop].rstrip("\r")
            self.at = min(stop + 1, self.end)
            if (line.lstrip("\t") if has_tabs else line) == delimiter:
                return

    def _end_word(self) -> None:
        frame = self.frames[-1]
        if frame.start < 0:
            return
        if frame.is_target:
            frame.is_target = False
        else:
            frame.words.append(Word(frame.start, self.at, joined_pieces(frame.pieces)))
        frame.start, frame.pieces = -1, []

    def _drop_words(self) -> None:
        frame = self.frames[-1]
        frame.words, frame.start, frame.pieces = [], -1, []

    def _end_command(self, operator: str) -> None:
        self._end_word()
        frame = self.frames[-1]
        words = self._without_keywords(frame)
        if words:
            self.commands.append(Command(tuple(words), frame.after, self._is_conditional(frame), frame.arrays))
            frame.arrays = {}
        frame.words, frame.is_target = [], False
        if operator != "\n" or words or frame.after not in {"&&", "||", "|"}:
            frame.after = operator

    def _without_keywords(self, frame: Frame) -> list[Word]:
        words = frame.words
        for position, word in enumerate(words):
            keyword = self.text[word.start : word.end] if word.end - word.start < 9 else ""
            if keyword in _OPEN_HEADS:
                frame.depth += 1
                return []
            if keyword in _OPEN_TESTS:
                frame.depth += 1
            elif keyword in _CLOSE:
                frame.depth = max(0, frame.depth - 1)
            elif keyword == "function":
                return []
            elif keyword not in _PASSED_OVER:
                return words[position:]
        return []

    def _is_conditional(self, frame: Frame) -> bool:
        return frame.is_conditional or frame.depth > 0 or frame.after in {"&&", "||"}

    def _is_next(self, letters: str) -> bool:
        return self.text.startswith(letters, self.at, self.end)

    def _match(self, pattern: re.Pattern[str]) -> int:
        found = pattern.match(self.text, self.at, self.end)
        return found.end() if found else self.at
