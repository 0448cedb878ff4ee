"""Where the given files call something of a library, under whatever name they have it."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache

from drumline_lint.program import names
from drumline_lint.program.tree import last_name, position
from drumline_lint.program.whole import Whole
from drumline_lint.reading.source import Source

_WORD = re.compile(r"\w+")


def calls_in_all(program: Whole, wanted: tuple[str, ...]) -> Iterator[ast.Call]:
    """All calls of these in all given files that mention them."""
    lasts = {name.rpartition(".")[2] for name in wanted}
    for source in program.files.sources:
        if any(last in source.text for last in lasts):
            yield from calls_in(program, source, wanted)


def calls_in(program: Whole, source: Source, wanted: tuple[str, ...]) -> Iterator[ast.Call]:
    """All calls of these in a file, by the library's full name, in the order of the text."""
    by_last = _by_last_name(wanted)
    if not any(last in source.text for last in by_last):
        return iter(())
    calls = program.files.index(source).calls
    found = [
        call
        for last in by_last
        for call in calls.get(last, ())
        if program.name_of(call.func) in by_last[last]
    ]
    for alias in aliases(program, source, (*by_last, *wanted)) - by_last.keys():
        found += [call for call in calls.get(alias, ()) if program.name_of(call.func) in wanted]
    return iter(sorted(found, key=position))


def calls_by_word(found: Iterable[tuple[Source, Iterable[ast.Call]]]) -> dict[str, list[ast.Call]]:
    """Calls by every word of their files: who looks for those that may be about a name need not read all texts. One
    that a file has under a name of another file's is not found."""
    by_word: dict[str, list[ast.Call]] = defaultdict(list)
    for source, calls in found:
        every = list(calls)
        for word in set(_WORD.findall(source.text)) if every else ():
            by_word[word] += every
    return by_word


@cache
def _by_last_name(wanted: tuple[str, ...]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = defaultdict(set)
    for name in wanted:
        found[name.rpartition(".")[2]].add(name)
    return found


def aliases(program: Whole, source: Source, wanted: Iterable[str]) -> set[str]:
    """Other names that a file has for them: `from torch.nn.parallel import DistributedDataParallel as DDP`."""
    every = program.remember(("aliases", source), lambda: _find_aliases(program, source))
    return set().union(*(every[name] for name in wanted if name in every))


def _find_aliases(program: Whole, source: Source) -> dict[str, set[str]]:
    """By the full name of what is imported, and by the last name of what is assigned."""
    found: dict[str, set[str]] = defaultdict(set)
    for scope in program.files.index(source).scopes.values():
        for name, bindings in scope.names.items():
            for binding in bindings:
                if binding.imported:
                    found[names.canonical(binding.imported)].add(name)
                elif isinstance(binding.value, ast.Attribute | ast.Name) and binding.kind == "assign":
                    found[last_name(binding.value)].add(name)
    return found
