"""Code that is Python, but not this one: how newer ones and Python 2 are written, at the place where parsing ends."""

from __future__ import annotations

import ast
import re
import sys
import warnings
from collections.abc import Iterable

FARTHEST = 500
"""So much of a line is looked at: who writes by hand writes no more."""
MOST_ENDS = 20
EXCEPT = "multiple exception types must be parenthesized"

_PARAMETERS = r"\[\s*\*{0,2}[A-Za-z_]\w*\s*(?:[,:=].*)?\]\s*"
_OPENED = r"^\s*(?:(?:async\s+)?def|class)\s+\w+\s*"
# What the line at fault looks like; parsing ends where the match ends.
_NEWER = (
    (rf"{_OPENED}(?=\[[^\]()]*[\w\s]=[\w\s].*\]\s*[(:])", "defaults of type parameters are", (3, 13)),
    (rf"{_OPENED}\[[^\]()=]*(?==[^=].*\]\s*[(:])", "defaults of type parameters are", (3, 13)),
    (rf"^\s*(?:async\s+)?def\s+\w+\s*(?={_PARAMETERS}\()", "type parameters are", (3, 12)),
    (rf"^\s*class\s+\w+\s*(?={_PARAMETERS}[(:])", "type parameters are", (3, 12)),
    (r"^\s*type\s+(?=\w+\s*(?:\[.+\]\s*)?=[^=])", "the type statement is", (3, 12)),
    (r"(?i)\b(?:t|rt|tr)(?=[\"'])", "a t-string is", (3, 14)),
    (r"^\s*lazy\s+(?=import\s+\w|from\s+[.\w]+\s+import\s+[\w(*])", "a lazy import is", (3, 15)),
)
_PYTHON_2 = (
    r"\braise\s+[\w.]+\s*(?=,\s*\S)",
    r"(?<![\w.])(?=0[0-7]{3}\b)",
    r"\b\d*(?=\d[lL]\b)",
    r"(?=<>)",
    r"(?:[=(,+%\[]|\breturn|\bprint)\s*(?=`[^`]+`)",
    r"(?i)\bur(?=[\"'])",
)
# In Python 2 the last name gets the exception; in newer ones it is one more kind of exception.
_OLD_EXCEPT = r"\bexcept\s*(?:[\w.]+|\([^()]*\))\s*,\s*(?:_*[a-z]\w*|\([\w\s,]+\))\s*:"
_NEW_EXCEPT = r"\bexcept\*?\s+(?:[\w.]+\s*,\s*)+(?:[\w.]*\.\w+|_*[A-Z]\w*)\s*:"
_F_STRING = r"(?i)(?<!\w)(?:f|rf|fr)([\"'])(?!\1\1)"
_FORMAT = r"\s*=?\s*(?:![rsa])?(?::[^\"']*)?$"


def newer_python(error: SyntaxError) -> tuple[str, tuple[int, int]] | None:
    """What is written there that a newer Python than this one reads, and which; nothing where that is not likely."""
    found = _newer(error)
    return None if found is None or sys.version_info >= found[1] else found


def _newer(error: SyntaxError) -> tuple[str, tuple[int, int]] | None:
    line = _line(error)
    for pattern, what, version in _NEWER:
        if _ends_there(pattern, line, error):
            return what, version
    if error.msg == EXCEPT and re.search(_NEW_EXCEPT, line):
        return "except without parentheses is", (3, 14)
    if error.msg.startswith("f-string expression part cannot include a backslash"):
        return "a backslash between an f-string's braces is", (3, 12)
    if any(_has_own_quotes(line, opening.end(), opening[1]) for opening in re.finditer(_F_STRING, line)):
        return "an f-string with its own quotes inside is", (3, 12)
    return None


def is_python_2(error: SyntaxError) -> bool:
    """Whether it is a way to write that only Python 2 had."""
    line = _line(error)
    if re.match(r"Missing parentheses in call to '(?:print|exec)'", error.msg):
        return True
    if error.msg == EXCEPT:
        return re.search(_OLD_EXCEPT, line) is not None
    return any(_ends_there(pattern, line, error) for pattern in _PYTHON_2)


def _line(error: SyntaxError) -> str:
    return (error.text or "")[:FARTHEST]


def _ends_there(pattern: str, line: str, error: SyntaxError) -> bool:
    return any(found.end() + 1 == error.offset for found in re.finditer(pattern, line))


def _has_own_quotes(line: str, at: int, quote: str) -> bool:
    """Whether there is an expression between the braces of an f-string that has its quote in it."""
    while at < len(line) and line[at] != quote:
        if line[at] == "\\" or line.startswith("{{", at):
            at += 2
        elif line[at] == "{":
            inner = _between_braces(line, at + 1)
            if not inner or quote in inner:
                return bool(inner)
            at += len(inner) + 2
        else:
            at += 1
    return False


def _between_braces(line: str, start: int) -> str:
    """Up to the first brace that leaves an expression before it."""
    ends = (found.start() for found in re.finditer("}", line[start:]))
    for end, _ in zip(ends, range(MOST_ENDS), strict=False):
        inner = line[start : start + end]
        if _is_expression((inner, re.sub(_FORMAT, "", inner))):
            return inner
    return ""


def _is_expression(texts: Iterable[str]) -> bool:
    for text in texts:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                ast.parse(text.strip(), mode="eval")
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        return True
    return False
