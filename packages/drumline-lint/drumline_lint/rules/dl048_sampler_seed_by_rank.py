"""DL048: the seed of a DistributedSampler has the rank in it.

All ranks have to permute the data alike, since each takes its part of the permutation.
"""

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
    """Samplers whose order is another on every rank.

    sampler = DistributedSampler(data, seed=args.seed + rank)

    Without a shuffle, the seed is not used.
    """
    for sampler in program.calls(source, DISTRIBUTED_SAMPLER):
        shuffle = argument(sampler, 3, "shuffle")
        if program.values(shuffle) == {ConstantValue(False)}:
            continue

        seed = argument(sampler, 4, "seed")
        if any(_is_rank(program, term) for term in _terms(program, seed)):
            message = (
                "every rank permutes the data by another seed, so the parts that the ranks take "
                "overlap, and some samples are never read"
            )
            yield RULE.at(source, sampler, message)


def _terms(program: Program, seed: ast.expr | None) -> Iterator[ast.expr]:
    """`args.seed` and `rank` of `int(args.seed + rank)`.

    What a function makes of a rank, or the number of a group of ranks (`rank // 8`), may be the
    same on all ranks of the sampler.
    """
    for origin in written_values(program, seed):
        if isinstance(origin, ast.BinOp):
            if not isinstance(origin.op, ast.FloorDiv):
                yield from _terms(program, origin.left)
                yield from _terms(program, origin.right)
        elif isinstance(origin, ast.Call) and program.name_of(origin.func) == "int":
            yield from _terms(program, argument(origin, 0, "x"))
        else:
            yield origin


def _is_rank(program: Program, term: ast.expr) -> bool:
    """Whether it is a rank, or something else of which every process has its own.

    Examples: `rank`, `os.getpid()`, `info["rank"]`; not `args["seed"]`, which is an option.
    """
    if isinstance(term, ast.Call) and program.name_of(term.func) in _OWN:
        return True
    if isinstance(term, ast.Subscript):
        return "rank" in ast.unparse(term.slice).lower()  # `args["seed"]` is an option

    return any(isinstance(value, Rank) for value in program.values(term))
