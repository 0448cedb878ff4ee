"""DL031: one rank has a batch more than another, and waits for it."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.finding import Finding, Severity
from drumline_lint.program.arguments import has_unknown_arguments
from drumline_lint.program.imports import connected
from drumline_lint.program.names import LOADER
from drumline_lint.program.origins import written
from drumline_lint.program.program import Program
from drumline_lint.program.tree import Loop, inside, last_name
from drumline_lint.reading.source import Source
from drumline_lint.rule import Rule
from drumline_lint.running.alone import is_alone
from drumline_lint.running.distributed import framework
from drumline_lint.running.guards import is_on_some_only
from drumline_lint.training.loaders import given, loaders, training_loops
from drumline_lint.training.splits import uneven_split

RULE = Rule(
    id="DL031",
    name="uneven-inputs",
    severity=Severity.WARNING,
    summary="ranks may get different numbers of batches",
    why=(
        "Every backward pass exchanges gradients with all ranks. Data that is split by hand need not divide evenly: a "
        "rank with one batch more waits for the others, which have left the loop, until the timeout ends the job."
    ),
    fix=(
        "give every rank the same number of samples (DistributedSampler does), or put the loop into "
        "`with Join([model]):`"
    ),
    bad="""\
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader

mine = files[dist.get_rank() :: dist.get_world_size()]
loader = DataLoader(mine, batch_size=32)
model = DDP(network)
for inputs in loader:
    model(inputs).sum().backward()
""",
    good="""\
import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader

mine = files[dist.get_rank() :: dist.get_world_size()]
loader = DataLoader(mine, batch_size=32)
model = DDP(network)
with Join([model]):
    for inputs in loader:
        model(inputs).sum().backward()
""",
)


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Loaders of data split by hand, that a training loop goes through to their end."""
    calls = list(program.calls(source, LOADER))
    trained = training_loops(program) if calls else {}
    for call in calls:
        if call not in trained or not _takes_all(program, call):
            continue
        if not any(_waits_at_the_end(program, loop, call) for loop in trained[call]):
            continue
        split = uneven_split(program, given(call, "dataset"))
        if split is not None and not is_alone(program, call) and not is_on_some_only(program, call):
            said = program.source_of(split).code(split)
            yield RULE.at(
                source,
                call,
                f"{said} may give one rank a batch more than another, which then waits for the others",
            )


def _takes_all(program: Program, call: ast.Call) -> bool:
    """Whether a short last batch is kept, and nobody else chooses the samples."""
    if has_unknown_arguments(call):
        return False
    for name, usual in (("drop_last", False), ("sampler", None), ("batch_sampler", None)):
        expression = given(call, name)
        if expression is None:
            continue
        origins = written(program, expression)
        if not all(isinstance(one, ast.Constant) and one.value is usual for one in origins):
            return False
    return True


def _waits_at_the_end(program: Program, loop: Loop, loader: ast.Call) -> bool:
    if not isinstance(loop, ast.For | ast.AsyncFor) or loader not in loaders(program, loop.iter):
        return False
    home = program.source_of(loop)
    if framework(program, home) or any(True for _ in inside(loop, ast.Break)) or is_alone(program, loop):
        return False
    return "islice" not in home.code(loop.iter) and not _is_joined(program, home)


def _is_joined(program: Program, home: Source) -> bool:
    """Whether there is a `with model.join():` or `with Join([model]):` in the files that run with this one."""
    for source in connected(program, home):
        for statement in program.index(source).every(ast.With):
            for item in statement.items:
                called = getattr(item.context_expr, "func", None)
                if called is not None and last_name(called) in ("join", "Join"):
                    return True
    return False
