"""DL055: code hides GPUs from a rank and then counts as if it saw all."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from drumline_lint.findings import Finding, Severity, rule
from drumline_lint.flow.conditions import conditions, rank_tests_at
from drumline_lint.flow.distributed import distributed_sources
from drumline_lint.flow.guards import is_on_every_rank
from drumline_lint.flow.hosts import Setting, settings
from drumline_lint.program.names import INIT
from drumline_lint.program.origins import parts, previous_values
from drumline_lint.program.program import Program
from drumline_lint.program.tree import (
    enclosing_function,
    last_name,
    nodes_in,
    position,
    scope_of,
    statement_of,
)
from drumline_lint.program.value import ConstantValue, Rank
from drumline_lint.reading.allocation import sees_one_gpu, tasks_per_node
from drumline_lint.reading.source import Source
from drumline_lint.training.models import devices_given

RULE = rule("DL055", only_distributed=False, in_tests=False)
_STARTS_CUDA = tuple(
    f"torch.cuda.{name}"
    for name in "set_device init current_device get_device_properties get_device_name mem_get_info "
    "synchronize memory_allocated get_device_capability".split()
)
_BY_LOCAL_RANK = re.compile(
    r"(?:set_device\(|device_ids=\[|[\"']cuda[\"'], *|cuda:\{)\s*(?:int\()?(?:\w+\.)?"
    r"(?:local_rank|os\.environ\[.LOCAL_RANK)",
    re.IGNORECASE,
)


def check(program: Program, source: Source) -> Iterator[Finding]:
    """CUDA_VISIBLE_DEVICES that is set by the rank, or to one GPU for all ranks."""
    yield from _of_child(program, source)
    yield from _bound_to_tasks(program, source)
    is_distributed = source in distributed_sources(program)
    for setting in settings(program, source):
        if setting.name != "CUDA_VISIBLE_DEVICES" or any(rank_tests_at(program, setting.node)):
            continue
        if not is_distributed:
            if _is_late(program, source, setting.node):
                yield _late(source, setting)
            continue
        is_by_rank = _has_rank(program, setting.value) and not _lists_gpus(program, setting.value)
        if is_by_rank and _indexes_by_rank(program, source):
            message = (
                "each rank sees only its own GPU, which is cuda:0, "
                "and this file numbers GPUs by the local rank"
            )
            yield RULE.at(source, setting.node, message)
        elif _is_one(program, setting) and is_on_every_rank(program, setting.node):
            message = "every rank sees the same single GPU"
            is_joined = next(program.all_calls(INIT), None) is not None
            severity = None if is_joined else Severity.NOTE
            yield RULE.at(source, setting.node, message, severity=severity)
        elif _is_late(program, source, setting.node):
            yield _late(source, setting)


def _late(source: Source, setting: Setting) -> Finding:
    message = "the GPUs are already in use here, and the variable is no longer read"
    return RULE.at(source, setting.node, message, fix="set it before the process starts")


def _is_late(program: Program, source: Source, node: ast.AST) -> bool:
    """After a call in the same function that starts CUDA, perhaps in a function of its own."""
    starting: list[ast.AST] = list(program.calls(source, *_STARTS_CUDA))
    starting += [call for call in program.index(source).calls.get("cuda", ()) if not call.args]
    functions = {enclosing_function(call) for call in starting} - {None}
    starting += [call for function in functions if function for call in program.callers(function)]
    return any(
        enclosing_function(call) is enclosing_function(node)
        and position(call) < position(node)
        and not any(conditions(program, call, with_exits=False))
        for call in starting
    )


def _of_child(program: Program, source: Source) -> Iterator[Finding]:
    """A launcher that shows each child one GPU and numbers them, for a child that counts all."""
    if "LOCAL_RANK" not in source.text or "subprocess" not in source.text:
        return
    for function in program.index(source).every(ast.FunctionDef):
        variables = {name: (node, value) for name, node, value in _variables_in(function)}
        visible = variables.get("CUDA_VISIBLE_DEVICES")
        local_rank = variables.get("LOCAL_RANK")
        is_numbered = local_rank is not None and not isinstance(local_rank[1], ast.Constant)
        if visible is None or local_rank is None or not is_numbered or _is_list(visible[1]):
            continue
        files = [
            text.value
            for text in nodes_in(function, ast.Constant)
            if isinstance(text.value, str) and text.value.endswith(".py")
        ]
        if any(
            _BY_LOCAL_RANK.search(program.texts.get(file.rpartition("/")[2], "")) for file in files
        ):
            message = (
                "each child sees one GPU, which is cuda:0, and takes the GPU of its LOCAL_RANK"
            )
            yield RULE.at(source, local_rank[0], message, fix="set LOCAL_RANK=0, or show all GPUs")


def _variables_in(function: ast.FunctionDef) -> Iterator[tuple[str, ast.AST, ast.expr]]:
    """What a function writes to a mapping with constant keys."""
    for keyword in nodes_in(function, ast.keyword):
        if keyword.arg:
            yield keyword.arg, keyword, keyword.value
    for literal in nodes_in(function, ast.Dict):
        for key, value in zip(literal.keys, literal.values, strict=True):
            if isinstance(key, ast.Constant):
                yield str(key.value), key, value
    for statement in nodes_in(function, ast.Assign):
        target = statement.targets[0]
        if isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Constant):
            yield str(target.slice.value), statement, statement.value


def _is_list(value: ast.expr) -> bool:
    text = ast.unparse(value)
    return "join" in text or "," in text


def _has_rank(program: Program, value: ast.expr | None) -> bool:
    return any(
        isinstance(meaning, Rank)
        for part in parts(program, value)
        for meaning in program.values(part)
    )


def _lists_gpus(program: Program, value: ast.expr | None) -> bool:
    """`config["gpu_id"]` and `args.gpu_id` are what the user asks for, and may be several."""
    for part in parts(program, value):
        if isinstance(part, ast.Subscript) and isinstance(part.slice, ast.Constant):
            name = str(part.slice.value)
        elif isinstance(part, ast.Attribute) and not previous_values(program, part):
            name = part.attr
        else:
            continue
        if "gpu" in name.lower():
            return True
    return False


def _indexes_by_rank(program: Program, source: Source) -> bool:
    """By a rank that is not taken modulo the number of visible GPUs."""
    return any(
        _has_rank(program, device)
        and not any("device_count" in ast.unparse(part) for part in parts(program, device))
        and not _is_fixed(program, device)
        for device in devices_given(program, source)
    )


def _is_fixed(program: Program, device: ast.expr) -> bool:
    """Whether the last value that its variable gets in some function is a number: `local_rank = 0`."""
    return any(
        isinstance(part, ast.Constant)
        and isinstance(part.value, int)
        and _is_last_value(program, part)
        for part in parts(program, device)
    )


def _is_last_value(program: Program, value: ast.expr) -> bool:
    statement = statement_of(value)
    if not isinstance(statement, ast.Assign) or statement.value is not value:
        return False
    later = [
        name.id
        for name in nodes_in(scope_of(statement), ast.Name)
        if isinstance(name.ctx, ast.Store) and position(name) > position(value)
    ]
    names = {last_name(target) for target in statement.targets}
    return names.isdisjoint(later) and not any(conditions(program, statement))


def _bound_to_tasks(program: Program, source: Source) -> Iterator[Finding]:
    """`srun --gpus-per-task=1`."""
    started = [launch for launch in program.launches_of(source) if launch.srun is not None]
    for launch in started if _indexes_by_rank(program, source) else ():
        if sees_one_gpu(launch) and (tasks_per_node(launch) or 1) > 1:
            message = (
                f"--gpus-per-task=1 shows each task one GPU, which is cuda:0, "
                f"and {source.path.name} numbers GPUs by the local rank"
            )
            fix = "ask for --gpus-per-node, or add --gpu-bind=none"
            yield RULE.at(launch.script, launch.srun_word, message, fix=fix)


def _is_one(program: Program, setting: Setting) -> bool:
    values = program.values(setting.value)
    return bool(values) and all(
        isinstance(value, ConstantValue) and str(value.value).isdecimal() for value in values
    )
