"""Which files the program itself saves with tensors that were brought to the CPU first."""

from __future__ import annotations

import ast

from drumline.lint.program.arguments import argument
from drumline.lint.program.program import Program
from drumline.lint.program.tree import last_name

DEEPEST = 5


def is_saved_from_host(program: Program, path: ast.expr | None) -> bool:
    """Whether all that save a file of this name bring their tensors to the CPU, and there is one."""
    name = _file_name(path)
    return bool(name) and program.remember("saved from the CPU", lambda: _saved(program)).get(name, False)


def _saved(program: Program) -> dict[str, bool]:
    found: dict[str, bool] = {}
    for call in program.all_calls("torch.save"):
        name = _file_name(argument(call, 1, "f"))
        if name:
            found[name] = found.get(name, True) and _is_on_host(program, argument(call, 0, "obj"))
    return found


def _file_name(path: ast.expr | None) -> str:
    """The last part of a path, where it is written out: of `os.path.join(folder, "a.pt")`, `folder / "a.pt"`."""
    if (
        isinstance(path, ast.Call)
        and path.args
        and last_name(path.func) in ("join", "joinpath", "Path", "str")
    ):
        return _file_name(path.args[-1])
    if isinstance(path, ast.BinOp) and isinstance(path.op, ast.Div):
        return _file_name(path.right)
    if isinstance(path, ast.JoinedStr) and path.values:
        last = path.values[-1]
        is_whole = isinstance(last, ast.Constant) and "/" in str(last.value)
        return _file_name(last) if is_whole else ""
    if isinstance(path, ast.Constant) and isinstance(path.value, str):
        return path.value.rpartition("/")[2]
    return ""


def _is_on_host(program: Program, what: ast.expr | None, depth: int = 0) -> bool:
    """`x.cpu()`, `x.to("cpu")`, and containers of nothing else."""
    if what is None or depth > DEEPEST:
        return False
    if isinstance(what, ast.Constant):
        return True
    if isinstance(what, ast.Call):
        name = last_name(what.func)
        return name in ("cpu", "numpy", "item", "tolist") or (name == "to" and _says_cpu(what))
    if isinstance(what, ast.Name):
        parts = program.assigned(what)
    elif isinstance(what, ast.Dict):
        parts = what.values
    elif isinstance(what, ast.Tuple | ast.List):
        parts = what.elts
    else:
        parts = [what.value] if isinstance(what, ast.DictComp) else []
        parts += [what.elt] if isinstance(what, ast.ListComp) else []
    return bool(parts) and all(_is_on_host(program, one, depth + 1) for one in parts)


def _says_cpu(call: ast.Call) -> bool:
    given = argument(call, 0, "device")
    return isinstance(given, ast.Constant) and given.value == "cpu"
