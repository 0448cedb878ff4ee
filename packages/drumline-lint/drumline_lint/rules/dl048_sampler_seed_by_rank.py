"""DL048: the seed of a DistributedSampler has the rank in it."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.program.calls import argument
from drumline_lint.program.names import DISTRIBUTED_SAMPLER
from drumline_lint.program.origins import written_values
from drumline_lint.program.program import Program
from drumline_lint.program.value import ConstantValue, Rank
from drumline_lint.reading.source import Source

RULE = rule("DL048", only_distributed=False)
_OWN = ("time.time", "time.time_ns", "os.getpid", "random.randint", "random.random", "torch.seed")


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Samplers whose order is another on every rank."""
    for call in program.calls(source, DISTRIBUTED_SAMPLER):
        seed = argument(call, 4, "seed")
        is_shuffled = program.values(argument(call, 3, "shuffle")) != {ConstantValue(False)}
        if is_shuffled and any(_is_rank(program, part) for part in _terms(program, seed)):
            message = (
                "every rank permutes the data by another seed, so the parts that the ranks take "
                "overlap, and some samples are never read"
            )
            yield RULE.at(source, call, message)


def _terms(program: Program, seed: ast.expr | None) -> Iterator[ast.expr]:
    """The parts of a sum; what a function makes of a rank, or a number of a group of ranks, may be
    the same on all ranks of the sampler."""
    for origin in written_values(program, seed):
        if isinstance(origin, ast.BinOp) and not isinstance(origin.op, ast.FloorDiv):
            yield from _terms(program, origin.left)
            yield from _terms(program, origin.right)
        elif isinstance(origin, ast.Call) and program.name_of(origin.func) == "int":
            yield from _terms(program, origin.args[0] if origin.args else None)
        elif not isinstance(origin, ast.BinOp):
            yield origin


def _is_rank(program: Program, part: ast.expr) -> bool:
    """A rank, or something else of which every process has its own."""
    if isinstance(part, ast.Call) and program.name_of(part.func) in _OWN:
        return True
    if isinstance(part, ast.Subscript):
        return "rank" in ast.unparse(part.slice).lower()  # `args["seed"]` is an option
    return any(isinstance(value, Rank) for value in program.values(part))
