"""What is a device: the arguments of `.to(...)` and `torch.device(...)`, and whether they mean a GPU."""

from __future__ import annotations

import ast

from drumline_lint.program.arguments import argument
from drumline_lint.program.imports import connected
from drumline_lint.program.names import INIT
from drumline_lint.program.origins import written
from drumline_lint.program.program import Program
from drumline_lint.program.tree import last_name
from drumline_lint.program.value import Known, Made, Rank, Value
from drumline_lint.reading.source import Source

_WORDS = ("cuda", "device", "gpu", "rank")
_DEVICES = ("torch.device", "torch.cuda.current_device")


def moves_to_gpu(program: Program, call: ast.Call) -> bool:
    """Whether it is a `.to(device)` or `.cuda()`: not `.to(torch.float16)`, not `.to("cpu")`."""
    if not isinstance(call.func, ast.Attribute) or call.func.attr not in ("to", "cuda"):
        return False
    return call.func.attr == "cuda" or may_be_gpu(program, argument(call, 0, "device"))


def may_be_gpu(program: Program, expression: ast.expr | None) -> bool:
    """Whether it is a device and may be a GPU; where nothing is known of it, by its name."""
    if expression is None:
        return False
    origins = written(program, expression)
    return any(_is_gpu(program, one) for one in origins) or _is_gpu(program, expression)


def _is_gpu(program: Program, expression: ast.expr) -> bool:
    if isinstance(expression, ast.JoinedStr):
        return any(isinstance(one, ast.Constant) and "cuda" in str(one.value) for one in expression.values)
    said = [_says_gpu(program, value) for value in program.values(expression)]
    if any(one is not None for one in said):
        return True in said
    return any(word in last_name(expression).lower() for word in _WORDS)


def _says_gpu(program: Program, value: Value) -> bool | None:
    """None: it says nothing of devices."""
    if isinstance(value, Known):
        is_number = isinstance(value.value, int) and not isinstance(value.value, bool)
        return is_number or (isinstance(value.value, str) and "cuda" in value.value)
    if isinstance(value, Made) and value.name in _DEVICES:
        return not value.call.args or may_be_gpu(program, value.call.args[0])
    return True if isinstance(value, Rank) else None


def is_on_cpu_only(program: Program, source: Source) -> bool:
    """Whether all process groups of a file and those it runs with are gloo's, and nobody asks for a GPU."""
    files = connected(program, source)
    calls = [call for one in files for call in program.calls(one, INIT)]
    backends = [origin for call in calls for origin in written(program, argument(call, 0, "backend"))]
    is_gloo = all(isinstance(one, ast.Constant) and one.value == "gloo" for one in backends)
    return bool(backends) and is_gloo and not any("cuda" in one.text for one in files)
