"""DL023: every rank prints or logs."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.finding import Finding, Severity
from drumline_lint.program.arguments import argument, has_unknown_arguments
from drumline_lint.program.program import Program
from drumline_lint.program.tree import above, function_around, inside, last_name, statement_of
from drumline_lint.reading.source import Source
from drumline_lint.rule import Rule
from drumline_lint.running.conditions import after_in_block, leaves
from drumline_lint.running.guards import is_on_every_rank
from drumline_lint.training.outputs import Output, is_seen_to, names_the_rank, outputs

RULE = Rule(
    id="DL023",
    name="unguarded-print",
    severity=Severity.WARNING,
    summary="every rank prints or logs",
    why=(
        "Each line appears once for every process, out of order, and in a large job what matters is lost among "
        "them. Progress bars draw over each other, and trackers get a run for every rank."
    ),
    fix="do it under `if dist.get_rank() == 0:`, or name the rank in the message if every rank has something to say",
    bad="""\
import torch.distributed as dist

dist.barrier()
print("epoch done")
""",
    good="""\
import torch.distributed as dist

dist.barrier()
if dist.get_rank() == 0:
    print("epoch done")
""",
)
_SAID = {
    "print": "every rank comes to {name}, and its line appears once for each",
    "log": "every rank comes to {name}, and no logger is set up by rank",
    "bar": "every rank draws a bar by {name}, each over the others",
    "wandb": "every rank comes to {name}, not one for the whole job",
    "writer": "every rank opens a {name} on the same folder",
}
_FIXES = {
    "log": "log under `if dist.get_rank() == 0:`, or set the level of the other ranks to WARNING",
    "bar": "give it `disable=dist.get_rank() != 0`",
}


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Calls that show something, to which all ranks come."""
    for output in outputs(program, source):
        if _is_as_meant(program, output) or is_seen_to(program, source, output):
            continue
        if is_on_every_rank(program, output.call):
            said = _SAID[output.kind].format(name=source.code(output.call.func))
            yield RULE.at(source, output.call, said, fix=_FIXES.get(output.kind, ""))


def _is_as_meant(program: Program, output: Output) -> bool:
    call = output.call
    if has_unknown_arguments(call) and output.kind != "print":
        return True
    if (
        names_the_rank(program, call)
        or _is_about_failure(program, call)
        or _says_what_is_given(program, call)
    ):
        return True
    if output.kind == "bar":
        return any(keyword.arg in ("disable", "position") for keyword in call.keywords)
    return output.kind == "print" and (_is_to_file(call) or _is_redirected(call) or _is_help(call))


def _says_what_is_given(program: Program, call: ast.Call) -> bool:
    """`print(*args)` in a function of one's own, and one who calls it names the rank, or it is not known who does."""
    function = function_around(call)
    vararg = function.args.vararg.arg if function is not None and function.args.vararg is not None else ""
    given = [one.value for one in call.args if isinstance(one, ast.Starred)]
    if function is None or not any(isinstance(one, ast.Name) and one.id == vararg for one in given):
        return False
    callers = program.callers(function)
    return not callers or any(names_the_rank(program, caller) for caller in callers)


def _is_to_file(call: ast.Call) -> bool:
    """To a file, or to stderr, where warnings go."""
    file = argument(call, None, "file")
    return file is not None and last_name(file) != "stdout"


def _is_help(call: ast.Call) -> bool:
    """`print(parser.format_help())`: whoever asks for it starts no ranks."""
    written = [last_name(part).lower() for one in call.args for part in inside(one, ast.Name, ast.Attribute)]
    return any(word in name for name in written for word in ("help", "usage"))


def _is_about_failure(program: Program, call: ast.Call) -> bool:
    """In an `except`, or the last words of a process: whichever rank that is, it should be heard."""
    if any(isinstance(outer, ast.ExceptHandler) for outer in above(call)):
        return True
    following = after_in_block(statement_of(call))
    ends = 0 < len(following) <= 2 and leaves(program, following)
    return ends and not any(isinstance(one, ast.Return | ast.Continue | ast.Break) for one in following)


def _is_redirected(call: ast.Call) -> bool:
    managers = [
        item.context_expr for outer in above(call) if isinstance(outer, ast.With) for item in outer.items
    ]
    return any(isinstance(one, ast.Call) and last_name(one.func) == "redirect_stdout" for one in managers)
