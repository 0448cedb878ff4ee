"""One node of a job that a person starts by hand on each machine, described by a `.env` file.

Eight names are ours; everything else in the file goes into the ranks' environment as it is. Its values may be secrets,
so none of them is part of a message: a broken line is named by its number alone.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from drumline.errors import UsageError, as_list
from drumline.launch.hosts import COUNTS_FORM, read_counts, read_lines, wrong_name
from drumline.launch.node_plan import NodePlan
from drumline.text import plural
from drumline.untrusted import whole_number

NEEDED = ("NUMBER_OF_NODES", "NODE_RANK", "NUMBER_OF_GPUS", "MASTER_ADDR", "MASTER_PORT")
OPTIONAL = ("DDP_TIMEOUT_SECONDS", "DATASET_DIR", "OUTPUT_DIR")
KNOWN = (*NEEDED, *OPTIONAL)
# The least and the greatest value of each number.
NUMBERS = {
    "NODE_RANK": (0, None),
    "NUMBER_OF_GPUS": (1, None),
    "MASTER_PORT": (1, 65535),
    "DDP_TIMEOUT_SECONDS": (1, None),
}
# Closer than that to one of our names is a typo; NCCL_DEBUG and its like are far from all of them.
TYPO = 0.8
LINE = re.compile(r"(?:export\s+)?(?P<key>[A-Za-z_][A-Za-z0-9_]*)\s*=\s*(?P<value>.*)")
# As in bash, a backslash means nothing between single quotes. No two branches may begin with the same character.
QUOTED = re.compile(r"""(?:'(?P<plain>[^']*)'|"(?P<escaped>(?:\\.|[^"\\])*)")\s*(?:#.*)?""")
COMMENT = re.compile(r"(?:^|\s)#")
ESCAPED = re.compile(r"\\(.)")
ESCAPES = {"n": "\n", "t": "\t"}


@dataclass(frozen=True, kw_only=True)
class NodeSettings:
    num_nodes: int
    min_nodes: int | None = None
    """So many of them are enough; None needs all."""
    node_rank: int
    num_procs: int | None
    master_addr: str
    master_port: int
    timeout_s: int | None = None
    dataset_dir: str | None = None
    output_dir: str | None = None
    variables: Mapping[str, str] = field(default_factory=dict, repr=False)
    """All of the file, for the ranks' environment. May hold secrets: never printed."""

    @property
    def other_names(self) -> list[str]:
        """The variables that are not ours."""
        return sorted(self.variables.keys() - set(KNOWN))


@dataclass(frozen=True)
class _Value:
    where: str
    text: str = field(repr=False)


def read_env_file(path: Path) -> NodeSettings:
    """The node that the file describes; all mistakes are listed at once, each with its line."""
    values, problems = _parse(path, read_lines(path, str(path), flag="--env-file"))
    problems += _wrong_values(values)
    if missing := [key for key in NEEDED if key not in values]:
        problems.append(f"{path}: missing: {', '.join(missing)}")
    if problems:
        raise UsageError(as_list(f"{plural(len(problems), 'problem')} in {path}:", problems))
    text = {key: value.text for key, value in values.items()}
    timeout, counts = text.get("DDP_TIMEOUT_SECONDS"), read_counts(text["NUMBER_OF_NODES"])
    assert counts is not None
    assert counts.most is not None
    return NodeSettings(
        num_nodes=counts.most,
        min_nodes=counts.least,
        node_rank=int(text["NODE_RANK"]),
        num_procs=int(text["NUMBER_OF_GPUS"]),
        master_addr=text["MASTER_ADDR"],
        master_port=int(text["MASTER_PORT"]),
        timeout_s=int(timeout) if timeout else None,
        dataset_dir=text.get("DATASET_DIR") or None,
        output_dir=text.get("OUTPUT_DIR") or None,
        variables=text,
    )


def _parse(path: Path, lines: list[str]) -> tuple[dict[str, _Value], list[str]]:
    values: dict[str, _Value] = {}
    problems: list[str] = []
    for number, line in enumerate(lines, start=1):
        where = f"{path}:{number}"
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        found = LINE.fullmatch(line.strip())
        if found is None:
            problems.append(f"{where}: the line is not KEY=VALUE")
            continue
        key, text = found["key"], _unquoted(found["value"])
        near = [] if key in KNOWN else difflib.get_close_matches(key.upper(), KNOWN, n=1, cutoff=TYPO)
        if text is None:
            problems.append(f"{where}: the quotes of {key} are not closed, or text follows them")
        elif key in values:
            problems.append(f"{where}: {key} is set twice (first in {values[key].where})")
        elif near:
            problems.append(f"{where}: {key} is not known; did you mean {near[0]!r}?")
        else:
            values[key] = _Value(where, text)
    return values, problems


def _unquoted(value: str) -> str | None:
    """A value as bash would read it, nothing expanded; None when its quotes do not match."""
    if not value.startswith(("'", '"')):
        return COMMENT.split(value, maxsplit=1)[0].strip()
    found = QUOTED.fullmatch(value)
    if found is None or found["plain"] is not None:
        return found and found["plain"]
    return ESCAPED.sub(lambda escape: ESCAPES.get(escape[1], escape[1]), found["escaped"])


def _wrong_values(values: Mapping[str, _Value]) -> Iterator[str]:
    numbers = {}
    for key, (low, high) in NUMBERS.items():
        if key not in values or (key in OPTIONAL and not values[key].text):
            continue
        value = values[key]
        number = whole_number(value.text)
        if number is None or number < low or (high is not None and number > high):
            limits = f"from {low} up" if high is None else f"from {low} to {high}"
            yield f"{value.where}: {key} is {value.text!r}; a whole number {limits} is needed"
        else:
            numbers[key] = number
    nodes, rank = None, numbers.get("NODE_RANK")
    if count := values.get("NUMBER_OF_NODES"):
        counts = read_counts(count.text)
        nodes = None if counts is None else counts.most
        if nodes is None:
            yield f"{count.where}: NUMBER_OF_NODES is {count.text!r}; give {COUNTS_FORM}"
    if nodes is not None and rank is not None and rank >= nodes:
        yield (
            f"{values['NODE_RANK'].where}: NODE_RANK is {rank}, but NUMBER_OF_NODES is {nodes}: "
            f"ranks are 0 to {nodes - 1}"
        )
    if (address := values.get("MASTER_ADDR")) and (wrong := wrong_name(address.text)):
        yield f"{address.where}: MASTER_ADDR: {wrong}"


def node_from_settings(
    settings: NodeSettings, *, max_restarts: int, min_nodes: int | None = None, address: str | None = None
) -> NodePlan:
    """This machine, as its .env file or the flags describe it."""
    return NodePlan(
        min_nodes=min_nodes or settings.min_nodes,
        num_nodes=settings.num_nodes,
        node_rank=settings.node_rank,
        num_procs=settings.num_procs,
        endpoint=f"{settings.master_addr}:{settings.master_port}",
        # The others reach the first node by this name; its own name for itself may be its loopback.
        address=address or (settings.master_addr if settings.node_rank == 0 else None),
        max_restarts=max_restarts,
    )


def settings_defaults(settings: NodeSettings, run_name: str) -> list[tuple[str, str | None]]:
    """What a .env file sets, as flags of `drumline train`."""
    timeout, output = settings.timeout_s, settings.output_dir
    return [
        ("--dist.train_timeout_s", None if timeout is None else str(timeout)),
        ("--data.dir", settings.dataset_dir),
        ("--run", None if output is None else str(PurePosixPath(output) / run_name)),
    ]
