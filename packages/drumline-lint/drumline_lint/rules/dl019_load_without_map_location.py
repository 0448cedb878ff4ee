"""DL019: every rank loads onto the GPU that the file was saved from.

A tensor remembers its device, mostly the first GPU of a host. Without `map_location`, all ranks
load onto that one, which then is out of memory.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.findings import Finding, Severity, rule
from drumline_lint.flow.distributed import is_of_ranks
from drumline_lint.flow.guards import guards, is_main_only, is_on_every_rank
from drumline_lint.program.calls import argument, has_unknown_arguments
from drumline_lint.program.imports import calls_near
from drumline_lint.program.program import Program
from drumline_lint.program.tree import enclosing_class, enclosing_function, parent_of
from drumline_lint.reading.source import Source
from drumline_lint.training.saves import is_in_memory, is_own

RULE = rule("DL019", in_tests=False)


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Loads of a file that more than one process makes: `torch.load("model.pt")`.

    A file of each rank was saved from its own GPU, and one in memory from none.
    """
    for call in program.calls(source, "torch.load"):
        path = argument(call, 0, "f")
        if path is None or is_main_only(guards(program, call)) or _is_of_sample(program, call):
            continue
        if is_in_memory(program, path) or is_own(program, path) or _is_placed(call):
            continue

        file = source.code(path)
        location = argument(call, 1, "map_location")
        if _is_first_gpu(program, source, location) and is_on_every_rank(program, call):
            message = f"every rank loads {file} onto the first GPU"
            severity = Severity.WARNING if is_of_ranks(program, source) else None
            yield RULE.at(source, call, message, severity=severity)

        elif location is None or (isinstance(location, ast.Constant) and location.value is None):
            message = f"every rank loads {file} onto the GPU that it was saved from"
            yield RULE.at(source, call, message)


def _is_placed(call: ast.Call) -> bool:
    """Whether the tensors do not stay where they were saved, or there are none.

    Examples: `torch.load(path).cuda()`, `torch.load(path, mmap=True)`, options that may name a
    device, and `scheduler.load_state_dict(torch.load(path))`, whose state is numbers.
    """
    if argument(call, None, "mmap") is not None or has_unknown_arguments(call):
        return True

    outer = parent_of(call)
    if isinstance(outer, ast.Attribute):
        return outer.attr in ("cuda", "to", "cpu")

    return isinstance(outer, ast.Call) and "sched" in ast.unparse(outer.func).lower()


def _is_first_gpu(program: Program, source: Source, location: ast.expr | None) -> bool:
    """Whether all ranks of a host load onto the first GPU.

    Examples: `map_location="cuda:0"`, and `"cuda"`, the current one, where nothing chooses one.
    """
    device = location.value if isinstance(location, ast.Constant) else None
    if device == "cuda":
        return not calls_near(program, source, "torch.cuda.set_device")

    return device == "cuda:0"


def _is_of_sample(program: Program, call: ast.Call) -> bool:
    """Whether it loads samples, which are not saved from a GPU, or runs after the training.

    class Volumes(Dataset):
        def __getitem__(self, index):
            return torch.load(self.paths[index])
    """
    function = enclosing_function(call)
    if function is None:
        return False
    if any(word in function.name for word in ("__getitem__", "predict", "infer")):
        return True

    owner = enclosing_class(function)
    if owner is None:
        return False

    bases = [str(base) for base in program.ancestry(owner)]
    return any("Dataset" in name for name in (owner.name, *bases))
