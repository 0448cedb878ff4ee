"""DL035: deprecated names of mixed precision."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from drumline_lint.findings import Edit, Finding, rule
from drumline_lint.flow.conditions import conditions
from drumline_lint.program.calls import has_unknown_arguments
from drumline_lint.program.program import Program
from drumline_lint.program.tree import ancestors, end_position, is_called, parent_of, position
from drumline_lint.reading.source import Source

RULE = rule("DL035")
OLD = tuple(
    f"torch.{device}.amp.{name}"
    for device, every in (
        ("cuda", "autocast GradScaler custom_fwd custom_bwd"),
        ("cpu", "autocast GradScaler"),
    )
    for name in every.split()
)
_LONGER = {".amp.autocast_mode.": ".amp.", ".amp.grad_scaler.": ".amp."}
# The order of these has changed in torch.amp, their names have not.
AUTOCAST = ("enabled", "dtype", "cache_enabled")


# A version that has torch.amp.
_NEW = re.compile(r"(?<![\d.])(2[.]\d|2, *\d|[3-9][.]\d)")


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Calls and decorators, not annotations. An import is fixed together with all its uses."""
    if ".amp" not in source.text and "import amp" not in source.text:
        return
    mended: set[ast.AST] = set()
    for node in _used(program, source):
        name = _old(program, node)
        if name and not _is_for_old_torch(program, node):
            edits = _edits(program, source, node, mended)
            yield RULE.at(
                source,
                parent_of(node) if is_called(node) else node,
                f"{source.code(node)} is deprecated since torch 2.4",
                fix=f"write {_instead(name)}",
                edits=edits,
            )


def _used(program: Program, source: Source) -> list[ast.Attribute | ast.Name]:
    index = program.index(source)
    called = [call.func for call in index.every(ast.Call)]
    functions = [*index.every(ast.FunctionDef), *index.every(ast.AsyncFunctionDef)]
    decorators = [decorator for function in functions for decorator in function.decorator_list]
    named = [
        callee for callee in (*called, *decorators) if isinstance(callee, ast.Attribute | ast.Name)
    ]
    return sorted(named, key=position)


def _old(program: Program, node: ast.expr) -> str:
    name = program.name_of(node)
    for longer, short in _LONGER.items():
        name = name.replace(longer, short)
    return name if name in OLD else ""


def _is_for_old_torch(program: Program, node: ast.expr) -> bool:
    """Under a condition on the version, or on whether the new one is there; or where that could not
    be imported."""
    if any(isinstance(outer, ast.ExceptHandler) for outer in ancestors(node)):
        return True
    tests = [ast.unparse(test).lower() for test, _ in conditions(program, node)]
    return any(
        ("version" in test and _NEW.search(test)) or "hasattr(torch" in test for test in tests
    )


def _instead(name: str) -> str:
    _, device, _, last = name.split(".")
    return f'torch.amp.{last}({"device_type=" if "custom" in last else ""}"{device}", ...)'


def _edits(
    program: Program, source: Source, node: ast.Attribute | ast.Name, mended: set[ast.AST]
) -> list[Edit]:
    if isinstance(node, ast.Attribute):
        if _says_torch(program, source, node) and (
            device_edits := _device_given(program, source, node)
        ):
            last = node.attr
            return [
                Edit(start=position(node), end=end_position(node), text=f"torch.amp.{last}"),
                *device_edits,
            ]
        return []
    bindings = program.index(source).scopes[source.tree].names.get(node.id, [])
    statement = bindings[0].node if len(bindings) == 1 else None
    if not isinstance(statement, ast.ImportFrom) or statement in mended:
        return []
    mended.add(statement)
    return _edits_of_import(program, source, statement)


def _says_torch(program: Program, source: Source, node: ast.Attribute) -> bool:
    """Whether it is written out from `torch`, which was imported under its name."""
    root: ast.expr = node
    while isinstance(root, ast.Attribute):
        root = root.value
    return isinstance(root, ast.Name) and root.id == "torch" and program.name_of(root) == "torch"


def _edits_of_import(program: Program, source: Source, statement: ast.ImportFrom) -> list[Edit]:
    """`from torch.cuda.amp import autocast, GradScaler` and all calls of both; none, if one cannot
    be mended."""
    written = f"from {statement.module} import"
    line, column = position(statement)
    if statement.module not in ("torch.cuda.amp", "torch.cpu.amp") or {
        alias.name for alias in statement.names
    } - {"autocast", "GradScaler"}:
        return []
    if not source.lines[line - 1].encode()[column:].startswith(written.encode()):
        return []
    start = (line, column + len("from "))
    end = (line, column + len(f"from {statement.module}"))
    edits = [Edit(start=start, end=end, text="torch.amp")]
    names = {alias.asname or alias.name: alias.name for alias in statement.names}
    for use in program.index(source).every(ast.Name):
        if use.id in names and isinstance(use.ctx, ast.Load):
            device_edits = _device_given(program, source, use) if is_called(use) else []
            if not device_edits and (is_called(use) or names[use.id] == "autocast"):
                return []
            edits += device_edits
    scopes = program.index(source).scopes.values()
    is_bound_once = all(
        sum(len(scope.names.get(name, ())) for scope in scopes) == 1 for name in names
    )
    return edits if is_bound_once else []


def _names_device(call: ast.Call) -> bool:
    """Whether a device is already there."""
    keywords = {keyword.arg for keyword in call.keywords}
    is_first = bool(call.args) and isinstance(getattr(call.args[0], "value", None), str)
    return is_first or not keywords.isdisjoint({"device", "device_type"})


def _device_given(program: Program, source: Source, callee: ast.expr) -> list[Edit]:
    """The device as first argument of a call; none where it is not certain where that is."""
    call = parent_of(callee)
    name = _old(program, callee)
    line, column = end_position(callee)
    is_open = source.lines[line - 1].encode()[column:].startswith(b"(")
    if not isinstance(call, ast.Call) or not name or "custom" in name or not is_open:
        return []
    is_autocast = name.endswith("autocast")
    if has_unknown_arguments(call) or (is_autocast and len(call.args) > len(AUTOCAST)):
        return []
    if _names_device(call):
        return []
    is_line_end = not source.lines[line - 1].encode()[column + 1 :].strip()
    after = ("," if is_line_end else ", ") if call.args or call.keywords else ""
    opened = (line, column + 1)
    edits = [Edit(start=opened, end=opened, text=f'"{name.split(".")[1]}"{after}')]
    for value, meant in zip(call.args, AUTOCAST, strict=False) if is_autocast else ():
        if position(value) == opened:
            edits[0] = Edit(start=opened, end=opened, text=f"{edits[0].text}{meant}=")
        else:
            edits.append(Edit(start=position(value), end=position(value), text=f"{meant}="))
    return edits
