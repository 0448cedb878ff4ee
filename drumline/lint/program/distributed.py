"""Whether code runs in several processes. Of what does not, rules say nothing."""

from __future__ import annotations

import ast

from drumline.lint.program.imports import imported_sources
from drumline.lint.program.names import FRAMEWORKS, STARTS
from drumline.lint.program.program import Program
from drumline.lint.program.tree import Binding, inside
from drumline.lint.program.value import Class, Function, Library
from drumline.lint.reading.source import Source

_WORDS = (
    "torch.distributed",
    "DistributedDataParallel",
    "DistributedSampler",
    "import distributed",
    "torch.nn.parallel",
    "DDPManager",
)
_TRAINERS = ("transformers.Trainer", "transformers.TrainingArguments")


def distributed_sources(program: Program) -> set[Source]:
    """The files that train on several processes, and all that they import of the given ones.

    A file does if it calls torch.distributed's functions, DDP or the like, or a function of another file that does. To
    import from such a file, or to ask for a rank, is not enough.
    """
    return program.remember("distributed", lambda: _find_distributed(program))


def framework(program: Program, source: Source) -> str:
    """The framework that a file leaves samplers and wrapping to; empty if it does all itself."""
    for scope in program.index(source).scopes.values():
        for bindings in scope.names.values():
            for binding in bindings:
                if _is_framework(program, binding, source):
                    return binding.imported.partition(".")[0]
    return ""


def _is_framework(program: Program, binding: Binding, source: Source) -> bool:
    root = binding.imported.partition(".")[0]
    if root in FRAMEWORKS:
        return program.module(root, source) is None  # a file of one's own may have that name
    return binding.imported in _TRAINERS


def _find_distributed(program: Program) -> set[Source]:
    able = _able_to_start(program)
    return _closed(
        [source for source in program.sources if source in able and _starts(program, source)], program
    )


def _closed(sources: list[Source], program: Program) -> set[Source]:
    """With all that they import, and what that imports."""
    found, pending = set(sources), list(sources)
    while pending:
        others = [one for one in imported_sources(program, pending.pop()) if one not in found]
        found.update(others)
        pending += others
    return found


def _able_to_start(program: Program) -> set[Source]:
    """Files that speak of it, and those that import one of them, by however many others."""
    if not any(_speaks(source) for source in program.sources):
        return set()
    importers: dict[Source, list[Source]] = {}
    for source in program.sources:
        for other in imported_sources(program, source):
            importers.setdefault(other, []).append(source)
    pending = [source for source in program.sources if _speaks(source)]
    found = set(pending)
    while pending:
        others = [one for one in importers.get(pending.pop(), ()) if one not in found]
        found.update(others)
        pending += others
    return found


def _speaks(source: Source) -> bool:
    return any(word in source.text for word in _WORDS)


def _starts(program: Program, source: Source) -> bool:
    """Whether a call of the file, or one that is made in a function that it calls, starts or uses a group."""
    pending: list[ast.Call] = list(program.index(source).every(ast.Call))
    seen: set[ast.AST] = set()
    while pending:
        for value in program.values(pending.pop().func):
            if isinstance(value, Library) and value.name in STARTS:
                return True
            if not isinstance(value, Function | Class) or value.node in seen:
                continue
            seen.add(value.node)
            if program.source_of(value.node) is not source:
                pending += inside(value.node, ast.Call, into_functions=True)
    return False
