"""DL007: all ranks of a host use the same GPU."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from drumline_lint.findings import Finding, Severity, rule
from drumline_lint.flow.conditions import conditions
from drumline_lint.flow.distributed import framework
from drumline_lint.flow.guards import is_on_some_only
from drumline_lint.flow.never_run import is_never_run
from drumline_lint.flow.run_order import is_for_script
from drumline_lint.flow.shown import joins_within
from drumline_lint.flow.single_process import is_in_run, is_single_process, may_start
from drumline_lint.program.calls import argument
from drumline_lint.program.imports import calls_near, connected
from drumline_lint.program.names import DDP, INIT
from drumline_lint.program.origins import written_values
from drumline_lint.program.program import Program
from drumline_lint.program.tree import (
    Binding,
    ancestors,
    dotted,
    last_name,
    nodes_in,
    position,
    scope_of,
    statement_of,
)
from drumline_lint.program.value import ConstantValue
from drumline_lint.reading.allocation import sees_one_gpu
from drumline_lint.reading.source import Source
from drumline_lint.training.models import devices_given, wrapped

RULE = rule("DL007")
_FIXED = re.compile(r"cuda:\d+")
_CHOOSING = ("set_device", "device_ids", "cuda.device(", "set_default_device", "device_id")
_MASK = "CUDA_VISIBLE_DEVICES"
_SEES_ONE = re.compile(
    _MASK + r"=[\"']?\$(?:\d|\{?(?:i|gpu|rank|local_rank|SLURM_LOCALID)\b)", re.IGNORECASE
)


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Numbers of GPUs that are written out, wherever a device is asked for, if every rank comes
    there."""
    if framework(program, source) or not connected(program, source).isdisjoint(_masking(program)):
        return  # where each process sees one GPU only, its number is 0
    started = program.launches_of(source)
    if any(sees_one_gpu(run) or _SEES_ONE.search(run.script.text) for run in started):
        return
    devices = {
        fixed
        for device in devices_given(program, source)
        for fixed in _fixed(program, device)
        if program.source_of(fixed) is source
    }
    for node in sorted(devices, key=position):
        if _is_for_all(program, node) and not _is_chosen_elsewhere(program, source, node):
            yield RULE.at(
                source, node, f"{source.code(node)} is the same GPU for all ranks of a host"
            )

    yield from _default_devices(program, source)
    yield from _before_choice(program, source)


def _default_devices(program: Program, source: Source) -> Iterator[Finding]:
    """`DDP(model.cuda())` in a program that nowhere chooses a GPU."""
    for call in program.calls(source, DDP):
        near = connected(program, source)
        is_whole = any(True for file in near for _ in program.calls(file, INIT))
        is_run = is_whole and not is_never_run(program, call)
        is_chosen = not is_run or any(word in file.text for file in near for word in _CHOOSING)
        model = None if is_chosen or call.keywords else wrapped(call)
        for move in written_values(program, model):
            if isinstance(move, ast.Call) and _moves_to_default(program, move):
                message = f"{source.code(move)} is the first GPU for all ranks of a host"
                severity = Severity.NOTE if _uses_gloo(program, source) else None
                yield RULE.at(source, move, message, severity=severity)


def _uses_gloo(program: Program, source: Source) -> bool:
    """Gloo works where ranks share a GPU, as they do in demonstrations."""
    backends = [
        program.values(argument(init, 0, "backend")) for init in calls_near(program, source, INIT)
    ]
    return all(values == {ConstantValue("gloo")} for values in backends)


def _before_choice(program: Program, source: Source) -> Iterator[Finding]:
    """`.cuda()` before `torch.cuda.set_device` in the same function."""
    for choice in program.calls(source, "torch.cuda.set_device"):
        for call in nodes_in(scope_of(choice), ast.Call):
            is_before = position(call) < position(choice) and not any(conditions(program, choice))
            if is_before and isinstance(call.func, ast.Attribute) and _is_default(program, call):
                message = (
                    f"{source.code(call)} comes before set_device: "
                    "it is the first GPU for all ranks of a host"
                )
                yield RULE.at(source, call, message, fix="call torch.cuda.set_device first")


def _is_default(program: Program, call: ast.Call) -> bool:
    """A model or a tensor that goes to the default GPU, on every rank."""
    return _moves_to_default(program, call) and not any(conditions(program, call))


def _moves_to_default(program: Program, move: ast.Call) -> bool:
    """`.cuda()` and `.to("cuda")`"""
    if last_name(move.func) == "cuda":
        return not move.args
    devices = written_values(program, move.args[0]) if move.args else []
    devices = [
        device.args[0] if isinstance(device, ast.Call) and device.args else device
        for device in devices
    ]
    return last_name(move.func) == "to" and any(
        isinstance(device, ast.Constant) and device.value == "cuda" for device in devices
    )


def _masking(program: Program) -> set[Source]:
    return program.cached(
        "masking", lambda: {source for source in program.sources if _MASK in source.text}
    )


def _fixed(program: Program, device: ast.expr) -> list[ast.expr]:
    """The fixed numbers that it may be; none if it may be something else as well."""
    if _is_number(device):
        return [device]
    origins = written_values(program, device)
    if not all(_is_settled(program, origin) for origin in origins):
        return []
    return [origin for origin in origins if _is_named(origin)]


def _is_settled(program: Program, expression: ast.expr) -> bool:
    """Whether it is the same on all ranks for sure."""
    if isinstance(expression, ast.Call) and _is_device_call(program, expression):
        origins = [
            origin for argument_ in expression.args for origin in written_values(program, argument_)
        ]
        return all(_is_settled(program, origin) for origin in origins)
    return isinstance(expression, ast.Constant)


def _is_named(expression: ast.expr) -> bool:
    value = expression.value if isinstance(expression, ast.Constant) else None
    return isinstance(value, str) and _FIXED.fullmatch(value) is not None


def _is_number(expression: ast.expr) -> bool:
    """Written out here: a variable that is 0 may get another value where it is not seen."""
    value = expression.value if isinstance(expression, ast.Constant) else None
    return isinstance(value, int) and not isinstance(value, bool)


def _is_for_all(program: Program, node: ast.AST) -> bool:
    is_fallback = any(isinstance(outer, ast.ExceptHandler) for outer in ancestors(node))
    # the properties of the first GPU are those of all
    is_query = any(
        isinstance(outer, ast.Call) and last_name(outer.func).startswith("get_device")
        for outer in ancestors(node)
    )
    is_script = any(
        isinstance(outer, ast.stmt) and is_for_script(outer) for outer in ancestors(node)
    )
    return (
        not is_fallback
        and not is_query
        and (not is_script or joins_within(program, program.source_of(node).tree))
        and not is_on_some_only(program, node)
        and not is_single_process(program, node)
        and is_in_run(program, node)
        and not is_never_run(program, node)
    )


def _is_chosen_elsewhere(program: Program, source: Source, node: ast.expr) -> bool:
    """Whether the variable that it is for gets a device by rank in another place: it was a
    default."""
    statement = statement_of(node)
    if not isinstance(statement, ast.Assign) or not _is_or_makes(program, statement.value, node):
        return False
    every: list[Binding] = []
    if any(_is_given_to_start(program, target) for target in statement.targets):
        return True
    for target in statement.targets:
        if isinstance(target, ast.Name):
            every += program.index(source).scopes[scope_of(target)].names[target.id]
        elif isinstance(target, ast.Attribute):
            written_so = ast.dump(target.value)
            attributes = program.index(source).attributes[target.attr]
            every += [
                binding
                for attribute, binding in attributes
                if ast.dump(attribute.value) == written_so
            ]
    origins = [
        origin
        for binding in every
        if not binding.path
        for origin in written_values(program, binding.value)
    ]
    return not all(_is_settled(program, origin) for origin in origins)


def _is_given_to_start(program: Program, target: ast.expr) -> bool:
    """`args.device = "cuda:0"`, before `init_distributed_device(args)` chooses one."""
    if not isinstance(target, ast.Attribute):
        return False
    owner = dotted(target.value)
    return any(
        may_start(program, call) and owner in map(dotted, call.args)
        for call in nodes_in(scope_of(target), ast.Call)
    )


def _is_or_makes(program: Program, value: ast.expr, node: ast.expr) -> bool:
    """Whether a value is this device, and not something that is put on it."""
    return any(
        origin is node
        or (_is_device_call(program, origin) and any(part is node for part in ast.walk(origin)))
        for origin in written_values(program, value)
    )


def _is_device_call(program: Program, expression: ast.expr) -> bool:
    return isinstance(expression, ast.Call) and program.name_of(expression.func) == "torch.device"
