"""DL023: every rank prints or logs."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.findings import Finding, Severity, rule
from drumline_lint.flow.conditions import always_exits, rank_tests_at, rest_of_block
from drumline_lint.flow.distributed import framework
from drumline_lint.flow.guards import is_on_every_rank
from drumline_lint.program.calls import argument, has_unknown_arguments
from drumline_lint.program.program import Program
from drumline_lint.program.tree import ancestors, last_name, nodes_in, statement_of
from drumline_lint.program.value import Rank, RankTest
from drumline_lint.reading.source import Source

RULE = rule("DL023")
_TQDM = [
    f"tqdm.{module}{name}"
    for module in ("", "auto.", "std.", "notebook.", "rich.")
    for name in ("tqdm", "trange")
]
KINDS = {
    **dict.fromkeys(
        ("print", "rich.print", "rich.console.Console.print", "pprint.pprint", "click.echo"),
        "print",
    ),
    **dict.fromkeys(("logging.info", "logging.getLogger.info", "loguru.logger.info"), "log"),
    **dict.fromkeys((*_TQDM, "rich.progress.track"), "bar"),
    **dict.fromkeys(("wandb.init", "wandb.log", "wandb.init.log"), "wandb"),
    **dict.fromkeys(
        ("mlflow.start_run", "neptune.init_run", "comet_ml.Experiment", "swanlab.init", "aim.Run"),
        "tracker",
    ),
    "torch.utils.tensorboard.SummaryWriter": "writer",
    "torch.utils.tensorboard.writer.SummaryWriter": "writer",
    "tensorboardX.SummaryWriter": "writer",
}
_MESSAGES = {
    "print": "{name} runs on every rank",
    "log": "{name} runs on every rank, and no logger is set up by rank",
    "bar": "{name} draws a progress bar on every rank",
    "wandb": "{name} runs on every rank",
    "tracker": "{name} begins a run on every rank",
    "writer": "{name} is opened on every rank, with the same folder",
}
_FIXES = {
    "log": "log under `if dist.get_rank() == 0:`, or set the level of the other ranks to WARNING",
    "bar": "give it `disable=dist.get_rank() != 0`",
}
_CONFIGURING = (
    "basicConfig",
    "dictConfig",
    "fileConfig",
    "setLevel",
    "addHandler",
    "addFilter",
    "disable",
)
_PARTS = (ast.Name, ast.Attribute, ast.Call, ast.Constant)
# DETR's helper replaces `print` on all ranks but the first; it is copied from project to project.
_REPLACING = ("setup_for_distributed", "init_distributed_mode")


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Calls that show something, on every rank."""
    for call in program.calls(source, *KINDS):
        kind = KINDS[program.name_of(call.func)]
        if _is_intended(program, call, kind) or _is_quiet(program, source, kind):
            continue
        if is_on_every_rank(program, call):
            message = _MESSAGES[kind].format(name=source.code(call.func))
            # a second run or file for each rank is more than a line that is printed twice
            severity = Severity.WARNING if kind in ("wandb", "writer", "tracker") else None
            fix = _FIXES.get(kind, "")
            yield RULE.at(source, call, message, fix=fix, severity=severity)


def _is_intended(program: Program, call: ast.Call, kind: str) -> bool:
    """It names the rank, is about a failure, goes to a file or to stderr, or is a bar that may be
    off."""
    if (
        has_unknown_arguments(call)
        or _names_rank(program, call)
        or _is_about_failure(program, call)
    ):
        return True
    if kind == "bar":
        return any(keyword.arg in ("disable", "position") for keyword in call.keywords)
    file = argument(call, None, "file")
    return kind == "print" and file is not None and last_name(file) != "stdout"


def _is_about_failure(program: Program, call: ast.Call) -> bool:
    """In an `except`, or just before the process ends: whichever rank that is, it should be
    heard."""
    if any(isinstance(outer, ast.ExceptHandler) for outer in ancestors(call)):
        return True
    following = rest_of_block(statement_of(call))
    ends = 0 < len(following) <= 2 and always_exits(program, following)
    return ends and not any(
        isinstance(statement, ast.Return | ast.Continue | ast.Break) for statement in following
    )


def _names_rank(program: Program, call: ast.Call) -> bool:
    """Whether an argument depends on the rank, or its text has the word."""
    parts = [part for value in (*call.args, *call.keywords) for part in nodes_in(value, *_PARTS)]
    texts = [
        text for part in parts if isinstance(part, ast.Name) for text in program.assigned(part)
    ]
    parts += [part for text in texts if _is_text(text) for part in nodes_in(text, *_PARTS)]
    return any(_is_of_rank(program, part) for part in parts)


def _is_text(value: ast.expr) -> bool:
    is_formatted = isinstance(value, ast.Call) and last_name(value.func) in (
        "format",
        "str",
        "replace",
        "join",
    )
    return is_formatted or isinstance(value, ast.JoinedStr | ast.BinOp | ast.IfExp)


def _is_of_rank(program: Program, part: ast.expr) -> bool:
    if isinstance(part, ast.Constant):
        return isinstance(part.value, str) and "rank" in part.value.lower()
    if isinstance(part, ast.Call) and program.name_of(part.func) == "os.getpid":
        return True
    return any(isinstance(value, Rank | RankTest) for value in program.values(part))


def _is_quiet(program: Program, source: Source, kind: str) -> bool:
    """Whether the program keeps the other ranks quiet elsewhere, or never shows what is logged."""
    if kind == "print":
        return program.cached("prints are replaced", lambda: any(_replaces_print(program)))
    if kind == "log":
        configured = program.cached("loggers", lambda: [*_logging_calls(program)])
        return not configured or any(configured) or bool(framework(program, source))
    if kind == "wandb":
        begun = list(program.all_calls("wandb.init"))
        return any(
            argument(call, None, "group") is not None or _names_rank(program, call)
            for call in begun
        )
    return False


def _replaces_print(program: Program) -> Iterator[bool]:
    """`builtins.print = ...`, `sys.stdout = ...`, or a helper that does so."""
    for source in program.sources:
        index = program.index(source)
        yield bool(index.attributes.get("print") or index.attributes.get("stdout"))
        yield any(index.calls.get(name) for name in _REPLACING)


def _logging_calls(program: Program) -> Iterator[bool]:
    """Of each call that sets up logging: whether it depends on the rank."""
    for source in program.sources:
        for name, calls in program.index(source).calls.items():
            if name in _CONFIGURING or "logg" in name.lower():
                for call in calls:
                    is_by_rank = name in _CONFIGURING and any(rank_tests_at(program, call))
                    if name in _CONFIGURING or _names_rank(program, call):
                        yield is_by_rank or _names_rank(program, call)
