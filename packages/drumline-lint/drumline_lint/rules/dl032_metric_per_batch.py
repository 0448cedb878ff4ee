"""DL032: the mean of batches' means is taken for that of the samples."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.finding import Finding, Severity
from drumline_lint.program.arguments import argument
from drumline_lint.program.names import LOADER
from drumline_lint.program.program import Program
from drumline_lint.program.tree import Loop, end_position, inside, last_name, position, scope_node
from drumline_lint.program.value import Known, Made
from drumline_lint.reading.source import Source
from drumline_lint.rule import Rule
from drumline_lint.running.loops import evaluation_loops

RULE = Rule(
    id="DL032",
    name="metric-per-batch",
    severity=Severity.WARNING,
    summary="an evaluation averages over batches, not over samples",
    why=(
        "The last batch is often smaller than the others, and then its samples count for more. Every rank has a last "
        "batch of its own: the same model gets another score on 8 GPUs than on one."
    ),
    fix="add up the loss times the number of samples, and divide by the number of samples, over all ranks",
    bad="""\
import torch
import torch.distributed as dist
import torch.nn.functional as F

dist.barrier()
total = 0.0
with torch.no_grad():
    for x, y in loader:
        total += F.cross_entropy(model(x), y).item()
print(total / len(loader))
""",
    good="""\
import torch
import torch.distributed as dist
import torch.nn.functional as F

dist.barrier()
sums = torch.zeros(2, device=device)
with torch.no_grad():
    for x, y in loader:
        sums[0] += F.cross_entropy(model(x), y, reduction="sum")
        sums[1] += len(x)
dist.all_reduce(sums)
if dist.get_rank() == 0:
    print((sums[0] / sums[1]).item())
""",
)
TAKEN_OFF = ("item", "detach", "cpu", "float", "double", "to", "clone", "numpy")
LOSSES = ("criterion", "loss_fn", "loss_func", "loss_function", "compute_loss")
MEANS = ("numpy.mean", "statistics.mean", "statistics.fmean", "torch.mean")
DEEPEST = 4


def check(program: Program, source: Source) -> Iterator[Finding]:
    """The division by the number of batches, after a loop that added up means."""
    seen: set[ast.AST] = set()
    for loop in evaluation_loops(program, source):
        if _are_all_full(program, loop):
            continue
        added = {name for name, value in _added(loop) if _is_mean(program, value)}
        for node, name in _averages(program, loop, added):
            if node not in seen:
                seen.add(node)
                yield RULE.at(
                    source,
                    node,
                    f"{source.code(node)} averages over batches: {name} adds up each batch's mean, and the last "
                    "batch may be smaller",
                )


def _are_all_full(program: Program, loop: Loop) -> bool:
    """Batches of one, or the rest left out."""
    assert isinstance(loop, ast.For | ast.AsyncFor)
    loaders = program.made(program.iterated(loop.iter), LOADER)
    return any(
        program.values(argument(made.call, 8, "drop_last")) == {Known(True)}
        or program.values(argument(made.call, 1, "batch_size")) == {Known(1)}
        for made in loaders
    )


def _added(loop: Loop) -> Iterator[tuple[str, ast.expr]]:
    """What a loop adds up, or puts into lists."""
    for node in inside(loop, ast.AugAssign, ast.Call):
        if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add):
            yield ast.unparse(node.target), node.value
        elif (
            isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "append"
        ):
            yield ast.unparse(node.func.value), node.args[0] if node.args else node


def _is_mean(program: Program, value: ast.expr, depth: int = 0) -> bool:
    """Whether it is the mean of a batch, not weighted by its size."""
    while isinstance(value, ast.Call) and last_name(value.func) in TAKEN_OFF:
        inner = value.func.value if isinstance(value.func, ast.Attribute) else (value.args or [value])[0]
        if inner is value:
            return False
        value = inner
    if isinstance(value, ast.Name) and depth < DEEPEST:
        given = program.assigned(value)
        return bool(given) and all(_is_mean(program, one, depth + 1) for one in given)
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Div):
        return any(
            last_name(one.func) in ("len", "size", "numel") for one in inside(value.right, ast.Call)
        ) or any(one.attr == "shape" for one in inside(value.right, ast.Attribute))
    return isinstance(value, ast.Call) and _is_call_of_mean(program, value)


def _is_call_of_mean(program: Program, call: ast.Call) -> bool:
    name = program.name_of(call.func)
    if last_name(call.func) == "mean":
        return len(call.args) == (name == "torch.mean") and not call.keywords
    if name.startswith("torch.nn.functional.") and ("loss" in name or "entropy" in name):
        return _averages_itself(program, call)
    made = [value for value in program.values(call.func) if isinstance(value, Made)]
    if made:
        return all(
            one.name.startswith("torch.nn.")
            and one.name.endswith("Loss")
            and _averages_itself(program, one.call)
            for one in made
        )
    return not program.values(call.func) and last_name(call.func) in LOSSES and not call.keywords


def _averages_itself(program: Program, call: ast.Call) -> bool:
    given = argument(call, None, "reduction")
    return given is None or program.values(given) == {Known("mean")}


def _averages(program: Program, loop: Loop, added: set[str]) -> Iterator[tuple[ast.expr, str]]:
    """Divisions after the loop of what it added up by how many batches there were; means of lists."""
    assert isinstance(loop, ast.For | ast.AsyncFor)
    over = ast.unparse(program.iterated(loop.iter))
    counters = {
        ast.unparse(one.target)
        for one in inside(loop, ast.AugAssign)
        if isinstance(one.value, ast.Constant) and one.value.value == 1
    }
    for node in inside(scope_node(loop), ast.BinOp, ast.Call):
        if position(node) < end_position(loop):
            continue
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            name = _named(node.left, added)
            if name and _is_number_of_batches(node.right, {over, name}, counters):
                yield node, name
        elif isinstance(node, ast.Call) and program.name_of(node.func) in MEANS:
            name = _named(node.args[0], added) if len(node.args) == 1 else ""
            if name:
                yield node, name


def _named(expression: ast.expr, added: set[str]) -> str:
    """The sum that it is, or is made from; a sum divided already is another thing."""
    if any(isinstance(one.op, ast.Div | ast.Mult) for one in inside(expression, ast.BinOp)):
        return ""
    parts = (ast.unparse(one) for one in inside(expression, ast.Name, ast.Attribute))
    return next((part for part in parts if part in added), "")


def _is_number_of_batches(expression: ast.expr, lengths: set[str], counters: set[str]) -> bool:
    for node in inside(expression, ast.Call, ast.Name, ast.Attribute):
        if isinstance(node, ast.Call):
            if last_name(node.func) == "len" and node.args and ast.unparse(node.args[0]) in lengths:
                return True
        elif ast.unparse(node) in counters:
            return True
    return False
