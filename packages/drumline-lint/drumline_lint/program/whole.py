"""What the parts of a program ask of the whole.

An expression may be what a call gives, that what a function returns, and that is an expression again: whoever needs to
know asks the whole program. It is handed to the files that say what things are, so none of them imports it.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Protocol

from drumline_lint.program.asking import Asked, Found
from drumline_lint.program.files import Files
from drumline_lint.program.value import Values


class Whole(Protocol):
    """A program, to those that it is made of."""

    files: Files
    meanings: Asked
    """What names, parameters, functions and expressions were found to be."""

    def values(self, expression: ast.expr | None) -> Values:
        """All that it may be."""

    def name_of(self, expression: ast.expr) -> str:
        """The library's name for it; empty where it is not known."""

    def remember(self, key: object, find: Callable[[], Found]) -> Found:
        """What was found before."""
