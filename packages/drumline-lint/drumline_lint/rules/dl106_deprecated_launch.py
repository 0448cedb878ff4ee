"""DL106: torch.distributed.launch, which torchrun has replaced."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator

from drumline_lint.findings import Edit, Finding, rule
from drumline_lint.program.calls import argument
from drumline_lint.program.program import Program
from drumline_lint.program.tree import nodes_in
from drumline_lint.program.value import ConstantValue
from drumline_lint.reading.launchers import OLD_LAUNCH, Launch, launches
from drumline_lint.reading.shell import Script
from drumline_lint.reading.shell_parser import Word
from drumline_lint.reading.source import Source

RULE = rule("DL106", only_distributed=False)
IN_COMMAND = re.compile(r"\bpython\S*\s+(?:-\w+\s+)*-m\s+torch\.distributed\.launch\b")
RUNNERS = tuple(
    "os.popen os.system subprocess.Popen subprocess.call subprocess.check_call subprocess.check_output "
    "subprocess.getoutput subprocess.run".split()
)


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Imported, or started from Python."""
    if "launch" not in source.text:
        return
    for node in [
        *_imports(program, source),
        *_in_lists(program, source),
        *_in_commands(program, source),
    ]:
        yield RULE.at(source, node, "torch.distributed.launch is deprecated in favour of torchrun")


def _imports(program: Program, source: Source) -> Iterator[ast.AST]:
    index = program.index(source)
    for node in [*index.every(ast.Import), *index.every(ast.ImportFrom)]:
        module = node.module if isinstance(node, ast.ImportFrom) and not node.level else None
        names = [f"{module}.{alias.name}" if module else alias.name for alias in node.names]
        if any(f"{name}.".startswith(f"{OLD_LAUNCH}.") for name in names):
            yield node


def _in_lists(program: Program, source: Source) -> Iterator[ast.AST]:
    """`[sys.executable, "-m", "torch.distributed.launch", ...]`."""
    index = program.index(source)
    for node in [*index.every(ast.List), *index.every(ast.Tuple)]:
        words = [part.value if isinstance(part, ast.Constant) else None for part in node.elts]
        for position, pair in enumerate(itertools.pairwise(words)):
            if pair == ("-m", OLD_LAUNCH):
                yield node.elts[position + 1]


def _in_commands(program: Program, source: Source) -> Iterator[ast.AST]:
    for call in program.calls(source, *RUNNERS):
        command = (
            argument(call, 0, "args") or argument(call, 0, "command") or argument(call, 0, "cmd")
        )
        if command is None:
            continue
        texts: list[object] = [part.value for part in nodes_in(command, ast.Constant)]
        texts += [
            value.value for value in program.values(command) if isinstance(value, ConstantValue)
        ]
        if any(isinstance(text, str) and IN_COMMAND.search(text) for text in texts):
            yield command


def check_shell(script: Script) -> Iterator[Finding]:
    """The fix is mechanical if the script already reads LOCAL_RANK, which --use-env shows."""
    for launch in launches(script):
        if launch.kind != OLD_LAUNCH:
            continue
        uses_env = "use-env" in launch.flags
        adds = (
            ""
            if uses_env
            else "; it adds --local-rank to the arguments of the script, which torchrun does not"
        )
        yield RULE.at(
            script,
            launch.name[-1],
            f"torch.distributed.launch is deprecated in favour of torchrun{adds}",
            fix="write torchrun instead of it, without --use-env" if uses_env else "",
            # YAML and Dockerfiles may have a word in quotes, or on a line of its own.
            edits=_edits(script, launch) if uses_env and script.container is None else (),
        )


def _edits(script: Script, launch: Launch) -> list[Edit]:
    flag = launch.flags["use-env"].word
    first = launch.name[0]
    last = launch.name[-1]
    if (
        not (first.start < last.start < flag.start <= launch.command.end)
        or first.start < launch.command.start
    ):
        return []
    is_usual = re.fullmatch(
        r"python3?(?: -u)? -m", " ".join(word.plain or "?" for word in launch.name[:-1])
    )
    blanks = re.compile(r"[ \t]*").match(script.text, flag.end)
    assert blanks is not None
    removed = Word(flag.start, blanks.end(), ())
    if is_usual:
        return [
            _edit(script, Word(first.start, last.end, ()), "torchrun"),
            _edit(script, removed, ""),
        ]
    # Another Python than the first on the path: its own torchrun is reached by the module.
    return [_edit(script, last, "torch.distributed.run"), _edit(script, removed, "")]


def _edit(script: Script, span: Word, text: str) -> Edit:
    return Edit(start=script.position(span.start), end=script.position(span.end), text=text)
