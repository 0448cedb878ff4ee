"""DL023: every rank prints or logs."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from drumline_lint.findings import Finding, rule
from drumline_lint.flow.conditions import after_in_block, leaves, rank_tests_at
from drumline_lint.flow.distributed import framework
from drumline_lint.flow.guards import is_on_every_rank
from drumline_lint.program.calls import argument, has_unknown_arguments
from drumline_lint.program.origins import parts
from drumline_lint.program.program import Program
from drumline_lint.program.tree import above, function_around, inside, last_name, statement_of
from drumline_lint.program.value import Rank, RankTest
from drumline_lint.reading.source import Source

RULE = rule("DL023")
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


_OF_PROCESS = ("os.getpid", "multiprocessing.current_process")
_TQDM = [
    f"tqdm.{module}{name}"
    for module in ("", "auto.", "std.", "notebook.", "rich.")
    for name in ("tqdm", "trange")
]
KINDS = {
    **dict.fromkeys(
        ("print", "rich.print", "rich.console.Console.print", "pprint.pprint", "click.echo"), "print"
    ),
    **dict.fromkeys(("logging.info", "logging.getLogger.info", "loguru.logger.info"), "log"),
    **dict.fromkeys((*_TQDM, "rich.progress.track"), "bar"),
    **dict.fromkeys(("wandb.init", "wandb.log", "wandb.init.log"), "wandb"),
    "torch.utils.tensorboard.SummaryWriter": "writer",
    "torch.utils.tensorboard.writer.SummaryWriter": "writer",
    "tensorboardX.SummaryWriter": "writer",
}
_CONFIGURING = ("basicConfig", "dictConfig", "fileConfig", "setLevel", "addHandler", "addFilter", "disable")
# DETR's helper replaces `print` on all ranks but the first; it is copied from project to project.
_REPLACING = ("setup_for_distributed", "init_distributed_mode")


@dataclass(frozen=True)
class Output:
    """One call that shows something."""

    call: ast.Call
    kind: str


def outputs(program: Program, source: Source) -> Iterator[Output]:
    """All in a file."""
    for call in program.calls(source, *KINDS):
        yield Output(call, KINDS[program.name_of(call.func)])


def is_seen_to(program: Program, source: Source, output: Output) -> bool:
    """Whether something elsewhere keeps the other ranks quiet, or it is not shown at all."""
    if output.kind == "print":
        return program.remember("prints are seen to", lambda: _is_print_replaced(program))
    if output.kind == "log":
        seen_to = program.remember("logs are seen to", lambda: _is_logging_seen_to(program))
        return seen_to or bool(framework(program, source))
    if output.kind == "wandb":
        return program.remember("wandb is seen to", lambda: _is_wandb_seen_to(program))
    return False


def names_the_rank(program: Program, call: ast.Call) -> bool:
    """Whether it can be told from what is shown whose it is, or an argument depends on the rank."""
    given = [*call.args, *(keyword.value for keyword in call.keywords)]
    for argument_ in given:
        for part in inside(argument_, ast.Name, ast.Attribute, ast.Call, ast.Constant):
            if _is_rank(program, part) or _says_rank(part):
                return True
            if isinstance(part, ast.Name) and any(
                _is_text_of_rank(program, v) for v in program.assigned(part)
            ):
                return True
    return False


def _is_rank(program: Program, part: ast.expr) -> bool:
    """The rank, what was found by it, or what tells one process from the others as well."""
    if isinstance(part, ast.Call) and program.name_of(part.func) in _OF_PROCESS:
        return True
    return any(isinstance(value, Rank | RankTest) for value in program.values(part))


def _says_rank(part: ast.expr) -> bool:
    return isinstance(part, ast.Constant) and isinstance(part.value, str) and "rank" in part.value.lower()


def _is_text_of_rank(program: Program, value: ast.expr) -> bool:
    is_text = isinstance(value, ast.JoinedStr | ast.BinOp | ast.Compare) or _is_format(value)
    return is_text and any(
        _is_rank(program, part) for part in inside(value, ast.Name, ast.Attribute, ast.Call)
    )


def _is_format(value: ast.expr) -> bool:
    return isinstance(value, ast.Call) and last_name(value.func) in ("format", "str", "replace", "join")


def _is_print_replaced(program: Program) -> bool:
    """`builtins.print = ...`, `sys.stdout = ...`, on some ranks."""
    for source in program.sources:
        index = program.index(source)
        if index.attributes.get("print") or index.attributes.get("stdout"):
            return True
        if any(index.calls.get(name) for name in _REPLACING):
            return True
    return False


def _is_logging_seen_to(program: Program) -> bool:
    """Whether ranks log differently, or nothing makes `info` appear at all."""
    is_shown = False
    for source in program.sources:
        index = program.index(source)
        if index.attributes.get("disabled") or any(_is_patch(program, one) for one in index.calls["setattr"]):
            return True
        is_shown |= "loguru" in source.text
        for name, calls in index.calls.items():
            is_configuring = name in _CONFIGURING
            is_shown |= is_configuring
            is_about_it = is_configuring or "logg" in name.lower() or name == "Formatter"
            if is_about_it and any(_is_by_rank(program, call) for call in calls):
                return True
    return not is_shown


def _is_patch(program: Program, call: ast.Call) -> bool:
    """`setattr(logger, "info", ...)`: it is no longer what it was."""
    return bool(call.args) and bool(program.made(call.args[0], "logging.getLogger"))


def _is_by_rank(program: Program, call: ast.Call) -> bool:
    """Under a condition on ranks, or given something that depends on one."""
    if last_name(call.func) in _CONFIGURING and any(rank_tests_at(program, call)):
        return True
    given = [*call.args, *(keyword.value for keyword in call.keywords)]
    return any(_is_rank(program, part) for one in given for part in parts(program, one))


def _is_wandb_seen_to(program: Program) -> bool:
    """Runs of one group, or a mode that depends on the rank."""
    if any("WANDB_MODE" in source.text for source in program.sources):
        return True
    begun = list(program.all_calls("wandb.init"))
    return any(argument(call, None, "group") is not None or names_the_rank(program, call) for call in begun)
