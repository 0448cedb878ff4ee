"""Whether code runs in several processes. Of what does not, rules say nothing."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline.lint.program.names import FRAMEWORKS, STARTS
from drumline.lint.program.program import Program
from drumline.lint.program.tree import inside
from drumline.lint.program.value import Class, Function, Library
from drumline.lint.reading.source import Source

_WORDS = (
    "torch.distributed",
    "DistributedDataParallel",
    "DistributedSampler",
    "import distributed",
    "DDPManager",
)
DEEPEST = 6


def distributed_sources(program: Program) -> set[Source]:
    """The files that train on several processes, and all that they import of the given ones.

    A file does if it calls torch.distributed's functions, DDP or the like, or a function of another file that does. To
    import from such a file, or to ask for a rank, is not enough.
    """
    starting = {source for source in program.sources if _starts(program, source)}
    pending, found = list(starting), set(starting)
    while pending:
        for other in imported_sources(program, pending.pop()):
            if other not in found:
                found.add(other)
                pending.append(other)
    return found


def framework(program: Program, source: Source) -> str:
    """The framework that a file leaves samplers and wrapping to; empty if it does all itself."""
    for scope in program.index(source).scopes.values():
        for bindings in scope.names.values():
            for binding in bindings:
                root = binding.imported.partition(".")[0]
                if root in FRAMEWORKS or binding.imported in (
                    "transformers.Trainer",
                    "transformers.TrainingArguments",
                ):
                    return root
    return ""


def imported_sources(program: Program, source: Source) -> Iterator[Source]:
    """The given files that a file imports."""
    for scope in list(program.index(source).scopes.values()):
        for bindings in scope.names.values():
            for binding in bindings:
                if binding.kind == "star":
                    other = program.module(binding.imported, source)
                elif binding.kind == "import":
                    package = binding.imported.rpartition(".")[0]
                    other = program.module(binding.imported, source) or program.module(package or ".", source)
                else:
                    continue
                if other is not None and other is not source:
                    yield other


def _starts(program: Program, source: Source) -> bool:
    if any(word in source.text for word in _WORDS):
        calls = program.index(source).every(ast.Call)
        if any(_is_start(program, call, 0) for call in calls):
            return True
    imported = set(imported_sources(program, source))
    if not any(word in other.text for other in imported for word in _WORDS):
        return False
    return any(_is_start(program, call, 0) for call in program.index(source).every(ast.Call))


def _starts_in(program: Program, node: ast.AST, depth: int = 0) -> bool:
    return any(_is_start(program, call, depth) for call in inside(node, ast.Call, into_functions=True))


def _is_start(program: Program, call: ast.Call, depth: int) -> bool:
    for value in program.values(call.func):
        if isinstance(value, Library) and value.name in STARTS:
            return True
        if isinstance(value, Function | Class) and 0 < depth + 1 < DEEPEST:
            if depth == 0 and program.source_of(value.node) is program.source_of(call):
                continue  # looked through as a part of its file
            if _starts_in(program, value.node, depth + 1):
                return True
    return False
