"""DL014: every rank writes the same file.

The last rank wins, or the file is a mixture. Known are the functions with which libraries save,
and files that a program opens itself.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from drumline_lint.findings import Finding, Severity, rule
from drumline_lint.flow.conditions import conditions
from drumline_lint.flow.distributed import is_of_ranks
from drumline_lint.program.calls import argument
from drumline_lint.program.names import DDP, FSDP
from drumline_lint.program.origins import parts
from drumline_lint.program.program import Program
from drumline_lint.program.tree import (
    called_name,
    enclosing_function,
    last_name,
    nodes_in,
    parent_of,
)
from drumline_lint.reading.source import Source
from drumline_lint.training.loaders import is_of_part
from drumline_lint.training.saves import Save, is_own, saves, severity_of_race

RULE = rule("DL014", in_tests=False)
_MODEL = re.compile(r"(^|_)(model|net|network|ddp|state_dict)$")
_WRITES = ("write", "writelines", "dump", "writerow", "writerows")
_GATHERED = (
    "gather the full state on every rank (get_model_state_dict with full_state_dict=True), "
    "then save under `if dist.get_rank() == 0:`"
)


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Files that all ranks write, with a path that is the same on all.

    Examples: `torch.save(model.state_dict(), "model.pt")`, and `open("results.json", "w")`.
    """
    yield from _saved(program, source)
    yield from _opened(program, source)


# Saves by a function of a library.


def _saved(program: Program, source: Source) -> Iterator[Finding]:
    """Saves by a function of a library: `torch.save(model.state_dict(), "model.pt")`.

    Those that cost little are notes: a second one in a function, one of settings, and one of what
    is made only if it is missing.
    """
    is_sharded = next(program.all_calls(*FSDP), None) is not None
    fix = _GATHERED if is_sharded else ""
    functions = set()

    for save in saves(program, source):
        severity = severity_of_race(program, save.call)
        if severity is None or is_own(program, save.path):
            continue
        if is_sharded and called_name(save.call) == "save_pretrained":
            continue  # of a sharded model, every rank must call it

        function = enclosing_function(save.call)
        # The first save of a function stands for those after it.
        is_first = function is None or function not in functions
        functions.add(function)
        is_shown = is_first and is_of_ranks(program, source) and _is_large(program, save)
        if not is_shown or _is_made_if_missing(program, save.call):
            severity = Severity.NOTE

        file = "the same file" if save.path is None else source.code(save.path)
        message = f"{source.code(save.call.func)} runs on every rank and writes {file}"
        yield RULE.at(source, save.call, message, fix=fix, severity=severity)


def _is_large(program: Program, save: Save) -> bool:
    """Whether a model or an optimizer is in it, or this rank's part of the data.

    Examples: `model.save_pretrained(path)`, `torch.save(net, path)`,
    `torch.save({"optimizer": optimizer.state_dict()}, path)`.
    """
    name = called_name(save.call)
    if name in ("save_pretrained", "save_model") or is_of_part(program, save.what):
        return True
    if name not in ("save", "save_file") or program.name_of(save.call.func).startswith("numpy."):
        return False
    if save.what is None:
        return False

    if _MODEL.search(last_name(save.what).lower()) or program.made(save.what, DDP, *FSDP):
        return True

    return any(
        isinstance(part, ast.Call) and called_name(part) == "state_dict"
        for part in parts(program, save.what)
    )


def _is_made_if_missing(program: Program, call: ast.Call) -> bool:
    """Whether it is made only once, and is there in most runs.

    if not os.path.exists("vocabulary.pt"):
        torch.save(vocabulary, "vocabulary.pt")
    """
    tests = [test for test, _ in conditions(program, call)]
    names = {called_name(question) for test in tests for question in nodes_in(test, ast.Call)}
    return not names.isdisjoint(("exists", "isfile", "is_file"))


# Files that the program opens itself.


def _opened(program: Program, source: Source) -> Iterator[Finding]:
    """What a program writes to read it again.

    with open("labels.json", "w") as file:
        json.dump(labels, file)
    """
    for call in program.index(source).calls.get("open", ()):
        mode = _mode(call)
        if not mode.startswith(("w", "x", "a")):
            continue

        is_part = _writes_part(program, call)
        if not is_part and not _dumps(program, call):
            continue

        path = argument(call, 0, "file")
        if path is None or severity_of_race(program, call) is None or is_own(program, path):
            continue

        file = source.code(path)
        message = f"every rank opens {file} for writing, and all write to it at the same time"
        # `open(path, "a")` adds a line of each rank, and none is lost
        is_lost = is_part and "a" not in mode and is_of_ranks(program, source)
        severity = Severity.WARNING if is_lost else Severity.NOTE
        yield RULE.at(source, call, message, severity=severity)


def _mode(call: ast.Call) -> str:
    """`w` of `open(path, "w")`; empty if the mode is not written out, or is the default."""
    mode = argument(call, 1, "mode")
    return str(mode.value) if isinstance(mode, ast.Constant) else ""


def _calls_of_block(call: ast.Call) -> list[ast.Call]:
    """The calls in the `with` that opens a file; outside of one, the call itself.

    with open(path, "w") as file:
        json.dump(results, file)  # this one, and `open`
    """
    item = parent_of(call)
    block = None if item is None else parent_of(item)
    return nodes_in(block if isinstance(block, ast.With) else call, ast.Call)


def _dumps(program: Program, call: ast.Call) -> bool:
    """Whether all that is written is one object, so that a rank replaces what another has
    written."""
    return any(program.name_of(inner.func) == "json.dump" for inner in _calls_of_block(call))


def _writes_part(program: Program, call: ast.Call) -> bool:
    """Whether what is written to an open file is of this rank's part of the data.

    A function without a loop writes a number of the whole dataset.

    for batch in loader_of_this_rank:
        file.write(str(model(batch)))
    """
    function = enclosing_function(call) or program.source_of(call).tree
    if not nodes_in(function, ast.For):
        return False  # a number of the whole dataset

    writes = [inner for inner in _calls_of_block(call) if called_name(inner) in _WRITES]
    return any(is_of_part(program, write.args[0]) for write in writes if write.args)
