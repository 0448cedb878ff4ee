"""Whether code runs in several processes. Of what does not, rules say nothing."""

from __future__ import annotations

from collections.abc import Iterator

from drumline.lint.program.names import FRAMEWORKS, STARTS
from drumline.lint.program.program import Program
from drumline.lint.program.tree import function_around
from drumline.lint.reading.source import Source

_WORDS = (
    "torch.distributed",
    "DistributedDataParallel",
    "DistributedSampler",
    "import distributed",
    "DDPManager",
)


def distributed_sources(program: Program) -> set[Source]:
    """The files that train on several processes, and all that they import of the given ones.

    A file does if it calls torch.distributed's functions, DDP or the like, or a function of another file that does. To
    import from such a file, or to ask for a rank, is not enough.
    """
    starting = _starting(program)
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


def _starting(program: Program) -> set[Source]:
    """Files with such a call, and files that call a function in which one is made, however far down."""
    pending = [
        call for source in program.sources if _may_start(source) for call in program.calls(source, *STARTS)
    ]
    found, seen = set(), set()
    while pending:
        call = pending.pop()
        found.add(program.source_of(call))
        function = function_around(call)
        if function is not None and function not in seen:
            seen.add(function)
            pending += program.callers(function)
    return found


def _may_start(source: Source) -> bool:
    return any(word in source.text for word in _WORDS)
