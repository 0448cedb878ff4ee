"""DL106: torch.distributed.launch, which torchrun has replaced."""

from __future__ import annotations

import re
from collections.abc import Iterator

from drumline.lint.finding import Edit, Finding, Severity
from drumline.lint.reading.launches import OLD_LAUNCH, Launch, launches
from drumline.lint.reading.shell import Script
from drumline.lint.reading.shell_parts import Word
from drumline.lint.rule import Rule

RULE = Rule(
    id="DL106",
    name="deprecated-launch",
    severity=Severity.WARNING,
    summary="torch.distributed.launch instead of torchrun",
    why=(
        "torch.distributed.launch is deprecated and will go. Unless it is given --use-env it also adds --local-rank to "
        "the arguments of the script, with a dash since torch 2.0: a script that reads --local_rank stops with "
        "`unrecognized arguments`."
    ),
    fix="use torchrun, and read os.environ['LOCAL_RANK'] in the script",
    bad="python -m torch.distributed.launch --use_env --nproc_per_node=8 train.py\n",
    good="torchrun --nproc_per_node=8 train.py\n",
    language="shell",
    fixable=True,
)


def check_shell(script: Script) -> Iterator[Finding]:
    """The mend is mechanical where the script reads LOCAL_RANK already, which --use-env tells."""
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
            edits=_edits(script, launch) if uses_env else (),
        )


def _edits(script: Script, launch: Launch) -> list[Edit]:
    """None where a part of the command comes out of a variable."""
    flag = launch.flags["use-env"].word
    first, last = launch.name[0], launch.name[-1]
    if (
        not (first.start < last.start < flag.start <= launch.command.end)
        or first.start < launch.command.start
    ):
        return []
    is_usual = re.fullmatch(r"python3?(?: -u)? -m", " ".join(word.plain or "?" for word in launch.name[:-1]))
    blanks = re.compile(r"[ \t]*").match(script.text, flag.end)
    assert blanks is not None
    removed = Word(flag.start, blanks.end(), ())
    if is_usual:
        return [_edit(script, Word(first.start, last.end, ()), "torchrun"), _edit(script, removed, "")]
    # Another Python than the first on the path: its own torchrun is reached by the module.
    return [_edit(script, last, "torch.distributed.run"), _edit(script, removed, "")]


def _edit(script: Script, span: Word, text: str) -> Edit:
    return Edit(start=script.position(span.start), end=script.position(span.end), text=text)
