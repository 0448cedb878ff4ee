"""DL019: every rank loads onto the GPU that the file was saved from."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from drumline_lint.findings import Finding, rule
from drumline_lint.flow.guards import is_on_main_only
from drumline_lint.program.calls import argument, has_unknown_arguments
from drumline_lint.program.program import Program
from drumline_lint.program.tree import class_around, function_around, inside, last_name, scope_node, up
from drumline_lint.program.value import Known
from drumline_lint.reading.source import Source
from drumline_lint.training.saves import is_in_memory, is_own
from drumline_lint.training.tensors import says_cpu

RULE = rule("DL019")


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Loads of a file that more than one process makes."""
    for call in program.calls(source, "torch.load"):
        if _is_told_where(program, call) or _is_of_sample(program, call) or is_on_main_only(program, call):
            continue
        path = argument(call, 0, "f")
        is_of_one = is_in_memory(program, path) or is_own(program, path)
        if not is_of_one and not is_saved_from_host(program, path):
            what = "a file" if path is None else source.code(path)
            said = f"every rank loads {what} onto the GPU that it was saved from"
            yield RULE.at(source, call, said)


def _is_told_where(program: Program, call: ast.Call) -> bool:
    given = argument(call, 1, "map_location")
    if given is not None:
        return program.values(given) != {Known(None)}
    mapped = argument(call, None, "mmap")
    return has_unknown_arguments(call) or (mapped is not None and program.values(mapped) != {Known(False)})


def _is_of_sample(program: Program, call: ast.Call) -> bool:
    """A dataset's files hold samples, which nobody saves from a GPU."""
    function = function_around(call)
    owner = None if function is None else class_around(function)
    if owner is None:
        return function is not None and function.name == "__getitem__"
    bases = [place for place in program.ancestry(owner) if isinstance(place, str)]
    return any("Dataset" in name for name in (owner.name, *bases))


DEEPEST = 5
_FILLING = ("update", "append", "extend", "insert", "setdefault", "add")


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
        return _is_brought(program, what, depth)
    parts = _parts(program, what)
    return bool(parts) and all(_is_on_host(program, one, depth + 1) for one in parts)


def _is_brought(program: Program, call: ast.Call, depth: int) -> bool:
    name = last_name(call.func)
    if name == "state_dict" and isinstance(call.func, ast.Attribute):
        return _is_on_host(program, call.func.value, depth + 1)
    return name in ("cpu", "numpy", "item", "tolist") or (name == "to" and says_cpu(call))


def _parts(program: Program, what: ast.expr) -> Sequence[ast.expr | None]:
    """None among them: of something that is not seen."""
    if isinstance(what, ast.Name):
        return [*program.assigned(what), *_filled_with(what)]
    if isinstance(what, ast.Dict):
        return what.values
    if isinstance(what, ast.Tuple | ast.List):
        return what.elts
    if isinstance(what, ast.DictComp):
        return [what.value]
    return [what.elt] if isinstance(what, ast.ListComp) else []


def _filled_with(name: ast.Name) -> Iterator[ast.expr | None]:
    """What comes in later, in the same function: by `x["key"] = ...`, or by a method, of which nothing is seen."""
    for other in inside(scope_node(name), ast.Name):
        outer = up(other) if other.id == name.id else None
        if isinstance(outer, ast.AugAssign) and outer.target is other:
            yield outer.value
        elif isinstance(outer, ast.Attribute) and outer.attr in _FILLING:
            yield None
        elif isinstance(outer, ast.Subscript) and isinstance(outer.ctx, ast.Store) and outer.value is other:
            statement = up(outer)
            yield (
                statement.value if isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign) else None
            )
