"""One node of a job that is started by hand on each machine, described by a `.env` file.

Eight names are ours; everything else in the file goes into the ranks' environment unchanged. Its
values may be secrets, so no message contains one: a message about a wrong line has only its number.
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from drumline.base.errors import UsageError, as_list
from drumline.base.text import plural
from drumline.base.untrusted import whole_number
from drumline.launch.hosts import COUNTS_FORM, read_counts, read_flag_file, wrong_name
from drumline.launch.node_plan import NodePlan

NEEDED = ("NUMBER_OF_NODES", "NODE_RANK", "NUMBER_OF_GPUS", "MASTER_ADDR", "MASTER_PORT")
OPTIONAL = ("DDP_TIMEOUT_SECONDS", "DATASET_DIR", "OUTPUT_DIR")
KNOWN = (*NEEDED, *OPTIONAL)
ENDLESS = sys.maxsize
# The allowed values of each number.
NUMBERS = {
    "NUMBER_OF_GPUS": range(1, ENDLESS),
    "MASTER_PORT": range(1, 65536),
    "DDP_TIMEOUT_SECONDS": range(1, ENDLESS),
}
# A name that is closer than this to one of ours is a typo; NCCL_DEBUG and the like are not.
TYPO = 0.8
LINE = re.compile(r"(?:export\s+)?(?P<key>[A-Za-z_][A-Za-z0-9_]*)\s*=\s*(?P<value>.*)")
# As in bash, a backslash has no meaning between single quotes. No two branches may begin with the
# same character.
QUOTED = re.compile(r"""(?:'(?P<plain>[^']*)'|"(?P<escaped>(?:\\.|[^"\\])*)")\s*(?:#.*)?""")
COMMENT = re.compile(r"(?:^|\s)#")
ESCAPED = re.compile(r"\\(.)")
ESCAPES = {"n": "\n", "t": "\t"}


@dataclass(frozen=True)
class EnvFile:
    """What a `.env` file says."""

    node: NodePlan
    variables: Mapping[str, str] = field(repr=False)
    """All of the file, for the ranks' environment. May hold secrets: never printed."""

    @property
    def other_names(self) -> list[str]:
        """The variables that are not ours."""
        return sorted(self.variables.keys() - set(KNOWN))

    def task_defaults(self, run_name: str) -> list[tuple[str, str | None]]:
        """The file's values as flags of `drumline train`."""
        timeout, data, output = (self.variables.get(name) or None for name in OPTIONAL)
        run = None if output is None else str(PurePosixPath(output) / run_name)
        return [("--dist.train_timeout_s", timeout), ("--data.dir", data), ("--run", run)]


def read_env_file(path: Path) -> EnvFile:
    """The node that the file describes; all mistakes are listed at once, each with its line."""
    values: dict[str, str] = {}
    places: dict[str, str] = {}
    problems = list(_read_values(path, values, places))
    problems += _wrong_values(values, places)
    if missing := [key for key in NEEDED if key not in values]:
        problems.append(f"{path}: missing: {', '.join(missing)}")
    if problems:
        raise UsageError(as_list(f"{plural(len(problems), 'problem')} in {path}:", problems))

    least, most = read_counts(values["NUMBER_OF_NODES"]) or (None, None)
    assert most is not None  # it was checked
    node = NodePlan(
        num_nodes=most,
        min_nodes=least,
        node_rank=int(values["NODE_RANK"]),
        num_procs=int(values["NUMBER_OF_GPUS"]),
        endpoint=f"{values['MASTER_ADDR']}:{int(values['MASTER_PORT'])}",
    )
    return EnvFile(node, values)


def _read_values(path: Path, values: dict[str, str], places: dict[str, str]) -> Iterator[str]:
    """Adds each value, and its `FILE:LINE` to `places`; yields what is wrong with a line."""
    text = read_flag_file(path, str(path), flag="--env-file")
    for number, line in enumerate(text.splitlines(), start=1):
        where = f"{path}:{number}"
        if not line.strip() or line.lstrip().startswith("#"):
            continue

        match = LINE.fullmatch(line.strip())
        if match is None:
            yield f"{where}: the line is not KEY=VALUE"
            continue

        key = match["key"]
        value = _unquoted(match["value"])
        if value is None:
            yield f"{where}: the quotes of {key} are not closed, or text follows them"
        elif key in values:
            yield f"{where}: {key} is set twice (first in {places[key]})"
        elif near := _near_name(key):
            yield f"{where}: {key} is not known; did you mean {near!r}?"
        else:
            values[key] = value
            places[key] = where


def _near_name(key: str) -> str | None:
    """The name of ours that this one is a typo of."""
    if key in KNOWN:
        return None

    matches = difflib.get_close_matches(key.upper(), KNOWN, n=1, cutoff=TYPO)
    return matches[0] if matches else None


def _unquoted(value: str) -> str | None:
    """A value as bash would read it, without expansion; None when its quotes do not match."""
    if not value.startswith(("'", '"')):
        return COMMENT.split(value, maxsplit=1)[0].strip()

    quoted = QUOTED.fullmatch(value)
    if quoted is None:
        return None

    if quoted["plain"] is not None:
        return quoted["plain"]
    return ESCAPED.sub(lambda escape: ESCAPES.get(escape[1], escape[1]), quoted["escaped"])


def _wrong_values(values: Mapping[str, str], places: Mapping[str, str]) -> Iterator[str]:
    """Yields what is wrong with a value of ours. An optional one may be empty."""
    set_values = {key: value for key, value in values.items() if value or key in NEEDED}
    counts = read_counts(set_values.get("NUMBER_OF_NODES", ""))
    nodes = counts[1] if counts else None
    if nodes is None and "NUMBER_OF_NODES" in set_values:
        yield f"{places['NUMBER_OF_NODES']}: NUMBER_OF_NODES is {set_values['NUMBER_OF_NODES']!r}; give {COUNTS_FORM}"
    numbers = {**NUMBERS, "NODE_RANK": range(nodes or ENDLESS)}
    for key, allowed in numbers.items():
        if key not in set_values:
            continue

        number = whole_number(set_values[key])
        if number is None or number not in allowed:
            limits = f"from {allowed.start} to {allowed[-1]}"
            if allowed.stop == ENDLESS:
                limits = f"from {allowed.start} up"
            yield f"{places[key]}: {key} is {set_values[key]!r}; a whole number {limits} is needed"

    if "MASTER_ADDR" in set_values and (wrong := wrong_name(set_values["MASTER_ADDR"])):
        yield f"{places['MASTER_ADDR']}: MASTER_ADDR: {wrong}"
