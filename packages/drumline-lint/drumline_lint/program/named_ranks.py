"""Whether an attribute that is named after the local rank can be believed: `cfg.LOCAL_RANK = set_up()` may be any."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.program.bindings import bound
from drumline_lint.program.tree import Binding, dotted, source_of
from drumline_lint.program.value import Known, Made, Rank, RankTest, Values
from drumline_lint.program.whole import Whole
from drumline_lint.reading.source import Source

_LOCAL: Values = frozenset({Rank("local")})
# Local or global: it is not told.
_EITHER: Values = frozenset({Rank("spawned")})


def believed(program: Whole, node: ast.Attribute, owners: Values, named: Values) -> Values:
    """What the name says, unless one of the given files puts something else there, or what cannot be told."""
    if named != _LOCAL:
        return named
    files = [source_of(node)] if any(map(_is_parsed, owners)) else program.files.sources
    every = [one for source in files for one in _assigned(program, source, node)]
    is_known = all(_may_be_local(bound(program, binding)) for binding in every)
    return named if is_known else _EITHER


def _is_parsed(owner: object) -> bool:
    """Arguments of the command line: what another script does with its own does not matter."""
    return isinstance(owner, Made) and owner.name.rpartition(".")[2].startswith("parse_")


def _assigned(program: Whole, source: Source, node: ast.Attribute) -> Iterator[Binding]:
    """What a file assigns to what is written the same way; `args.rank = int(args.rank)` says nothing."""
    if node.attr not in source.text:
        return
    for target, binding in program.files.index(source).attributes.get(node.attr, ()):
        if dotted(target.value) == dotted(node.value) and not _has(binding.value, node.attr):
            yield binding


def _has(value: ast.expr | None, name: str) -> bool:
    within = () if value is None else ast.walk(value)
    return any(isinstance(one, ast.Attribute) and one.attr == name for one in within)


def _may_be_local(values: Values) -> bool:
    """A constant stands for one process, and is followed by something else where there are several."""
    kinds = {value.kind for value in values if isinstance(value, Rank | RankTest)}
    return "local" in kinds or (bool(values) and all(isinstance(value, Known) for value in values))
