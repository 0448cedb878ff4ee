"""DL036: parameters that take no part in the loss, under a DDP that waits for them."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.finding import Finding, Severity
from drumline_lint.program.arguments import argument, has_unknown_arguments
from drumline_lint.program.names import DDP
from drumline_lint.program.program import Program
from drumline_lint.program.tree import FunctionNode, above, inside, last_name, scope_node
from drumline_lint.program.value import Instance, Known, Made
from drumline_lint.reading.source import Source
from drumline_lint.rule import Rule
from drumline_lint.running.conditions import rank_tests
from drumline_lint.training.parts import flows_only_into, has_parameters, outputs, parts_used
from drumline_lint.training.steps import rounds, training_loops

RULE = Rule(
    id="DL036",
    name="unused-outputs",
    severity=Severity.WARNING,
    summary="a part of a model in DDP takes no part in the loss",
    why=(
        "DDP waits in every backward until each parameter has its gradient. Those of a part whose output is not used, "
        "or that some ranks leave out, never come: the next forward raises an error about unfinished reductions, or "
        "ranks wait for each other until the timeout."
    ),
    fix="use the output in the loss, remove the part, or give find_unused_parameters=True if it is meant",
    bad="""\
import torch
from torch.nn.parallel import DistributedDataParallel as DDP


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(8, 2)
        self.aux = torch.nn.Linear(8, 2)

    def forward(self, x):
        return self.head(x), self.aux(x)


model = DDP(Net())
for x in loader:
    out, aux = model(x)
    out.sum().backward()
""",
    good="""\
import torch
from torch.nn.parallel import DistributedDataParallel as DDP


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(8, 2)
        self.aux = torch.nn.Linear(8, 2)

    def forward(self, x):
        return self.head(x), self.aux(x)


model = DDP(Net())
for x in loader:
    out, aux = model(x)
    (out.sum() + 0.3 * aux.sum()).backward()
""",
)
# They say of a tensor what is the same on every rank.
OF_SHAPE = ("size", "dim", "numel", "len", "isinstance", "hasattr", "getattr", "is_floating_point", "get")
RANDOM = ("random.", "numpy.random.", "torch.rand", "torch.bernoulli")


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Outputs that a training loop drops, and parts that a forward runs under a condition."""
    wrapped = program.remember(RULE.id, lambda: _wrapped(program))
    if not wrapped:
        return
    yield from _dropped(program, source, wrapped)
    for owner in wrapped:
        if program.source_of(owner) is source:
            yield from _conditional(program, source, owner)


def _wrapped(program: Program) -> list[ast.ClassDef]:
    """The modules that DDP gets, where it always expects all gradients."""
    strict: list[ast.ClassDef] = []
    lenient: list[ast.ClassDef] = []
    for call in program.all_calls(DDP):
        for value in program.values(argument(call, 0, "module")):
            if isinstance(value, Instance) and program.is_module(value.of):
                (strict if _is_strict(program, call) else lenient).append(value.of)
    return [one for one in dict.fromkeys(strict) if one not in lenient and not _freezes(one)]


def _is_strict(program: Program, call: ast.Call) -> bool:
    if has_unknown_arguments(call):
        return False
    given = [argument(call, None, name) for name in ("find_unused_parameters", "static_graph")]
    return all(one is None or program.values(one) == {Known(False)} for one in given)


def _freezes(owner: ast.ClassDef) -> bool:
    every = inside(owner, ast.Attribute, ast.Name, ast.keyword, into_functions=True)
    words = (one.arg if isinstance(one, ast.keyword) else last_name(one) for one in every)
    return any(word and word.startswith("requires_grad") for word in words)


def _dropped(program: Program, source: Source, wrapped: list[ast.ClassDef]) -> Iterator[Finding]:
    every = program.remember(f"{RULE.id} assigned", lambda: list(dict.fromkeys(_unpackings(program))))
    for names, call in every:
        owner = _module_called(program, call) if program.source_of(call) is source else None
        forward = program.method(owner, "forward") if owner is not None and owner in wrapped else None
        if owner is None or forward is None:
            continue
        given = outputs(forward)
        for name, output in zip(names, given, strict=True) if len(names) == len(given) else ():
            part = _own_part(program, owner, forward, output) if _is_unused(name) else ""
            if part:
                said = f"{name.id} is not used, and self.{part} of {owner.name} is only for it"
                yield RULE.at(source, call, f"{said}: its gradients never come, and DDP waits for them")
                break


def _unpackings(program: Program) -> Iterator[tuple[tuple[ast.Name, ...], ast.Call]]:
    """`a, b = model(x)` in what training loops run."""
    for loop in training_loops(program):
        for root in rounds(program, loop):
            for assign in inside(root, ast.Assign):
                target = assign.targets[0]
                parts = target.elts if isinstance(target, ast.Tuple | ast.List) else []
                names = tuple(one for one in parts if isinstance(one, ast.Name))
                is_plain = len(assign.targets) == 1 and 0 < len(names) == len(parts)
                if is_plain and isinstance(assign.value, ast.Call):
                    yield names, assign.value


def _module_called(program: Program, call: ast.Call) -> ast.ClassDef | None:
    """The class of the module in DDP that is called, if it is one."""
    made = [value for value in program.values(call.func) if isinstance(value, Made)]
    if not made or any(value.name != DDP for value in made):
        return None
    owners = {
        inner.of
        for value in made
        for inner in program.values(argument(value.call, 0, "module"))
        if isinstance(inner, Instance)
    }
    return owners.pop() if len(owners) == 1 else None


def _is_unused(name: ast.Name) -> bool:
    scope = scope_node(name)
    return not any(
        one.id == name.id and isinstance(one.ctx, ast.Load)
        for one in inside(scope, ast.Name, into_functions=True)
    )


def _own_part(program: Program, owner: ast.ClassDef, forward: FunctionNode, output: ast.expr) -> str:
    """A part with parameters that is used once, and for this output alone."""
    for part, uses in parts_used(owner).items():
        if (
            len(uses) == 1
            and flows_only_into(forward, uses[0], output)
            and has_parameters(program, owner, part)
        ):
            return part
    return ""


def _conditional(program: Program, source: Source, owner: ast.ClassDef) -> Iterator[Finding]:
    """`if x.mean() > 0: x = self.extra(x)`: other ranks see other data."""
    forward = program.method(owner, "forward")
    if forward is None:
        return
    used = parts_used(owner)
    for branch in inside(forward, ast.If):
        if not _differs(program, forward, branch.test):
            continue
        for part, uses in used.items():
            is_only_here = all(any(one in branch.body for one in above(use)) for use in uses)
            if is_only_here and has_parameters(program, owner, part):
                yield RULE.at(
                    source,
                    branch,
                    f"self.{part} is run only if {source.code(branch.test)}: where it is not, its gradients never "
                    "come, and DDP waits for them",
                )
                break


def _differs(program: Program, forward: FunctionNode, test: ast.expr) -> bool:
    """Whether a condition depends on the rank, on chance, or on what is in a batch."""
    if rank_tests(program, test):
        return True
    given = {one.arg for one in forward.args.args[1:]}
    for call in inside(test, ast.Call):
        if program.name_of(call.func).startswith(RANDOM):
            return True
        is_about_shape = last_name(call.func) in OF_SHAPE
        owner = call.func.value if isinstance(call.func, ast.Attribute) else None
        read = {one.id for one in inside(owner, ast.Name)} if owner is not None else set()
        if (
            not is_about_shape
            and read & given
            and last_name(call.func) in ("any", "all", "sum", "mean", "max", "min", "item")
        ):
            return True
    return False
