"""Splits shell text into simple commands and their words, with the place of each. Any text is
accepted."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

_EXPANSION = re.compile(r"(?<!\\)[$`]")
_VARIABLE = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)(?::?[-=?][^{}]*)?\})")


@dataclass(frozen=True, slots=True)
class Word:
    """One word of a command; offsets count characters of the file's text."""

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


@dataclass(eq=False, slots=True)
class Command:
    """A simple command, as it is written."""

    words: tuple[Word, ...]
    is_conditional: bool = False
    """Inside an if, a case or a loop, or after && or ||."""
    is_background: bool = False
    """Started with `&`, alone or with the commands around it."""
    loop: str = ""
    """The variable of the innermost `for`, or the keyword of another loop."""

    @property
    def start(self) -> int:
        return self.words[0].start

    @property
    def end(self) -> int:
        return self.words[-1].end


ASSIGNMENT = re.compile(r"[A-Za-z_]\w*(?:\[[^\]\s]*\])?\+?=")
# Every repetition is possessive, so that broken text takes no more time than other text.
_SINGLE = r"\$'(?:\\.|[^'\\])*+'|'[^']*+'"
_ARITHMETIC = r"\(\((?:[^()]|\([^()]*+\))*+\)\)"
_COMMAND = r"\$\((?:[^()]|\((?:[^()]|\([^()]*+\))*+\))*+\)|`[^`]*+`"
_BRACES = r"\$\{(?:[^{}]|\{[^{}]*+\})*+\}"
_DOUBLE = rf'"(?:\\.|{_COMMAND}|[^"\\])*+"'
# In templates, as in `DATA=<path of the data>` or `{{ path }}`; it is not valid shell.
_PLACEHOLDER = r"(?<=[=/])<\w[^<>\n]*+>|\{\{[^{}\n]*+\}\}"
_PROCESS = r"[<>]\((?:[^()]|\([^()]*+\))*+\)"
_PART = rf"""(?:\\(?!\r?\n).|{_SINGLE}|{_DOUBLE}|{_COMMAND}|{_BRACES}|{_PLACEHOLDER}|{_PROCESS}|[^\s;&|()<>'"`\\])"""


@cache
def _token() -> re.Pattern[str]:
    """Compiled by the first script: it takes as long as many rules."""
    return re.compile(
        rf"(?P<blank>[ \t\r\f\v]+|\\\r?\n|#[^\n]*|function[ \t]+[\w-]+|{_ARITHMETIC})"
        r"|<<-?[ \t]*(?P<quote>['\"]?)(?P<heredoc>\w+)(?P=quote)"
        rf"|(?:\d++|&)?(?:<<<|>>|>\||<>|[<>](?!\())(?:&[\d-]+|[ \t]*+{_PART}*+)"
        rf"|(?P<word>(?:[A-Za-z_]\w*+\+?=\((?:{_PART}|\s|#[^\n]*+\n)*+\)|{_PART})++)"
        r"|(?P<operator>&&|\|\|?|;;|[\n;&()])|.",
        re.DOTALL,
    )


@cache
def _quoted() -> re.Pattern[str]:
    return re.compile(
        rf"\\(?P<escaped>.)|\$?(?P<single>{_SINGLE})|(?P<double>{_DOUBLE})|{_COMMAND}|{_BRACES}",
        re.DOTALL,
    )


_ESCAPED_IN_QUOTES = re.compile(r"\\(?:\r?\n|([`\"\\]))")
_LOOPS = {"for", "while", "until", "select"}
_OPENING = {*_LOOPS, "if", "case", "{"}
_CLOSING = {"fi", "esac", "done", "}"}
_BETWEEN = {"then", "else", "elif", "do", "!"}


@dataclass(slots=True)
class _Block:
    """A compound command that is not closed yet."""

    keyword: str
    first: int
    """How many commands come before the list that it is a part of."""
    is_conditional: bool
    loop: str = ""
    is_header: bool = False
    """Whether `for NAME in ...` or `case ... in` goes on."""


def read_commands(text: str, start: int = 0, end: int | None = None) -> list[Command]:
    """The commands of the text, or of a part of it, without those in `$(...)`."""
    reader = _Reader()
    position = start
    end = len(text) if end is None else end
    while position < end and (token := _token().match(text, position, end)):
        position = token.end()
        if token.lastgroup == "word":
            reader.read_word(text, token)
        elif token.lastgroup == "heredoc":
            reader.heredocs.append(token["heredoc"])
        elif token.lastgroup == "operator":
            reader.read_operator(token[0])
            if token[0] == "\n":
                position = reader.after_heredocs(text, position, end)
    reader.end_command()
    return reader.commands


class _Reader:
    def __init__(self) -> None:
        self.commands: list[Command] = []
        self.heredocs: list[str] = []
        """The last lines of the texts that begin on the next line."""
        self._words: list[Word] = []
        self._blocks: list[_Block] = []
        self._first = 0
        self._is_conditional = False
        self._is_open = False
        """Whether the last word was an operator behind which a command must follow."""

    def read_word(self, text: str, token: re.Match[str]) -> None:
        self._is_open = False
        if self._words or not self._read_keyword(token[0]):
            self._words.append(_word(text, *token.span()))

    def read_operator(self, operator: str) -> None:
        block = self._blocks[-1] if self._blocks else None
        if operator == ")" and block is not None and block.keyword == "case":
            self._words.clear()
            block.is_header = False
        elif operator == "(":
            self._words.clear()  # the name of a function
            self._open("(")
        elif operator == ")":
            self._close()
        elif operator in {"&&", "||", "|"}:
            self.end_command()
            self._is_open = True
            self._is_conditional |= operator != "|"
        elif operator != "\n" or not self._is_open:
            self.end_command()
            for command in self.commands[self._first :] if operator == "&" else ():
                command.is_background = True
            self._first = len(self.commands)
            self._is_conditional = False

    def after_heredocs(self, text: str, position: int, end: int) -> int:
        for last_line in self.heredocs:
            heredoc_end = re.compile(rf"^[ \t]*{last_line}[ \t\r]*$", re.MULTILINE)
            line = heredoc_end.search(text, position, end)
            position = line.end() if line else end
        self.heredocs.clear()
        return position

    def end_command(self) -> None:
        block = self._blocks[-1] if self._blocks else None
        if block is not None and block.is_header:
            block.loop = self._words[0].text if self._words and block.loop else block.loop
            block.is_header = block.keyword == "case"
        elif self._words:
            loops = [block.loop for block in self._blocks if block.loop]
            is_conditional = self._is_conditional or any(
                block.is_conditional or block.keyword not in {"{", "("} for block in self._blocks
            )
            loop = loops[-1] if loops else ""
            self.commands.append(Command(tuple(self._words), is_conditional, loop=loop))
        self._words.clear()

    def _read_keyword(self, word: str) -> bool:
        if word in _OPENING:
            self._open(word)
        elif word in _CLOSING:
            self._close()
        return word in _OPENING or word in _CLOSING or word in _BETWEEN

    def _open(self, keyword: str) -> None:
        self._is_open = False
        loop = keyword if keyword in _LOOPS else ""
        is_header = keyword in {"for", "select", "case"}
        block = _Block(keyword, self._first, self._is_conditional, loop, is_header)
        self._blocks.append(block)
        self._is_conditional = False
        self._first = len(self.commands)

    def _close(self) -> None:
        self.end_command()
        if self._blocks:
            block = self._blocks.pop()
            self._first = block.first
            self._is_conditional = block.is_conditional


def _word(text: str, start: int, end: int) -> Word:
    written = text[start:end]
    items = None
    assignment = ASSIGNMENT.match(written)
    if assignment and written.startswith("(", assignment.end()):
        inner = read_commands(text, start + assignment.end() + 1, end - 1)
        items = tuple(word for command in inner for word in command.words)
    return Word(start, end, _quoted().sub(_unquoted, written), items)


def _unquoted(part: re.Match[str]) -> str:
    if part["single"] is not None:
        return part["single"].strip("$'").replace("$", "\\$")
    if part["double"] is not None:
        return _ESCAPED_IN_QUOTES.sub(r"\1", part["double"][1:-1])
    if part["escaped"] is not None:
        return "\\$" if part["escaped"] == "$" else part["escaped"]
    return part[0]


def inside_quotes(text: str, word: Word) -> tuple[int, int] | None:
    """The part between the quotes of a word that is one quoted text."""
    if word.code is not None:
        return word.code
    is_quoted = _quoted().fullmatch(text, word.start, word.end) and text[word.start] in "'\""
    return (word.start + 1, word.end - 1) if is_quoted else None
