"""DL056: the local rank is taken from the command line, where torchrun does not put it.

`torch.distributed.launch` passed `--local_rank`; torchrun sets the variable LOCAL_RANK. The option
then keeps its default, mostly 0, on every rank.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.findings import Finding, Severity, rule
from drumline_lint.flow.distributed import framework
from drumline_lint.program.calls import argument
from drumline_lint.program.imports import any_text_near, connected
from drumline_lint.program.program import Program
from drumline_lint.reading.launchers import TORCHRUN
from drumline_lint.reading.source import Source

RULE = rule("DL056")
_FLAGS = {"--local_rank", "--local-rank"}


def check(program: Program, source: Source) -> Iterator[Finding]:
    """The flag, if no file of the program reads LOCAL_RANK.

    parser.add_argument("--local_rank", type=int, default=0)

    DeepSpeed's launcher passes it.
    """
    if framework(program, source) == "deepspeed":
        return

    for option in program.index(source).calls.get("add_argument", ()):
        flags = [name for name in _names(option) if name in _FLAGS]
        if not flags or _reads_variable(program, source):
            continue

        message = f"torchrun passes no {flags[0]}: it keeps its default on every rank"
        is_sure = _is_for_torchrun(program, source) and _is_used(program, source, option)
        severity = None if is_sure else Severity.NOTE
        yield RULE.at(source, option, message, severity=severity)


def _names(option: ast.Call) -> list[str]:
    """The names of an option: `-r` and `--local_rank` of `add_argument("-r", "--local_rank")`."""
    return [str(part.value) for part in option.args if isinstance(part, ast.Constant)]


def _reads_variable(program: Program, source: Source) -> bool:
    """Whether a file of the program asks the environment: `os.environ["LOCAL_RANK"]`.

    Then the flag is there for launchers that pass it.
    """
    return any_text_near(program, source, '"LOCAL_RANK"', "'LOCAL_RANK'", "SLURM_LOCALID")


def _is_for_torchrun(program: Program, source: Source) -> bool:
    """Whether torchrun starts the file, or the file says so.

    A framework may have a launcher of its own, which passes the flag.
    """
    if framework(program, source):
        return False
    if "torchrun" in source.text:
        return True

    return any(launch.kind == TORCHRUN for launch in program.launches_of(source))


# Whether the option is used.


def _is_used(program: Program, source: Source, option: ast.Call) -> bool:
    """Whether some file of the program reads the option.

    Examples: `args.local_rank`, `vars(args)["local_rank"]`, `getattr(args, "local_rank")`.
    """
    name = _destination(option)
    return any(_is_read_in(program, near, name) for near in connected(program, source))


def _destination(option: ast.Call) -> str:
    """The attribute that argparse gives the value: by `dest`, or by the first long flag.

    `local_rank` of `add_argument("--local-rank")`.
    """
    destination = argument(option, None, "dest")
    if isinstance(destination, ast.Constant):
        return str(destination.value)

    flag = next(name for name in _names(option) if name.startswith("--"))
    return flag.lstrip("-").replace("-", "_")


def _is_read_in(program: Program, source: Source, name: str) -> bool:
    """Whether a file reads an attribute, or a key, of this name.

    It may be another object's: what is looked for is a program that never reads it.
    """
    index = program.index(source)
    for attribute in index.every(ast.Attribute):
        if attribute.attr == name and isinstance(attribute.ctx, ast.Load):
            return True

    keys = [part.slice for part in index.every(ast.Subscript) if isinstance(part.ctx, ast.Load)]
    keys += [argument(call, 1, "name") for call in index.calls.get("getattr", ())]
    keys += [argument(call, 0, "key") for call in index.calls.get("get", ())]
    return any(isinstance(key, ast.Constant) and key.value == name for key in keys)
