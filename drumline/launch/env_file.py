"""One node of a job that a person starts by hand on each machine, described by a `.env` file.

Eight names are ours; whatever else the file holds goes into the ranks' environment as it is. Its values may be
secrets, so none of them is ever part of a message: a broken line is named by its number alone.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from drumline.errors import UsageError, as_list
from drumline.launch.counts import FORM, read_counts
from drumline.launch.hosts import wrong_name
from drumline.untrusted import TEXT_BYTES, read_regular, whole_number

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
# Nearer than that to one of our names is a typing mistake; NCCL_DEBUG and its like are far from all of them.
TYPO = 0.8
LINE = re.compile(r"(?:export\s+)?(?P<key>[A-Za-z_][A-Za-z0-9_]*)\s*=\s*(?P<value>.*)")
# As in bash, a backslash means nothing between single quotes. No two branches may begin with the same character.
QUOTED = re.compile(r"""(?:'(?P<plain>[^']*)'|"(?P<escaped>(?:\\.|[^"\\])*)")\s*(?:#.*)?""")
COMMENT = re.compile(r"(?:^|\s)#")
ESCAPED = re.compile(r"\\(.)")
ESCAPES = {"n": "\n", "t": "\t"}


@dataclass(frozen=True, kw_only=True)
class NodeSettings:
    """What the file says about this node and the job."""

    num_nodes: int
    min_nodes: int | None = None
    """So many of them will do; None needs all."""
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
    """The node that the file describes; every mistake in it is told at once, with its line."""
    try:
        lines = read_regular(path, most=TEXT_BYTES, follow_links=True).decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise UsageError(
            f"{path} cannot be read: {reason}", next_step="check the path of --env-file"
        ) from error
    values, problems = _parse(path, lines)
    problems += _wrong_values(values)
    if missing := [key for key in NEEDED if key not in values]:
        problems.append(f"{path}: missing: {', '.join(missing)}")
    if problems:
        count = len(problems)
        heading = f"{count} problem{'s' if count > 1 else ''} in {path}:"
        raise UsageError(as_list(heading, problems))
    return _settings({key: value.text for key, value in values.items()})


def _settings(text: Mapping[str, str]) -> NodeSettings:
    timeout = text.get("DDP_TIMEOUT_SECONDS")
    counts = read_counts(text["NUMBER_OF_NODES"])
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
        if text is None:
            problems.append(f"{where}: the quotes of {key} are not closed, or something stands behind them")
        elif key in values:
            problems.append(f"{where}: {key} is there twice (first in {values[key].where})")
        elif near := _meant(key):
            problems.append(f"{where}: {key} is not known; did you mean {near!r}?")
        else:
            values[key] = _Value(where, text)
    return values, problems


def _unquoted(value: str) -> str | None:
    """A value as bash would read it, nothing expanded; None when its quotes do not match."""
    if not value.startswith(("'", '"')):
        return COMMENT.split(value, maxsplit=1)[0].strip()
    found = QUOTED.fullmatch(value)
    if found is None:
        return None
    if found["plain"] is not None:
        return found["plain"]
    return ESCAPED.sub(lambda escape: ESCAPES.get(escape[1], escape[1]), found["escaped"])


def _meant(key: str) -> str | None:
    if key in KNOWN:
        return None
    near = difflib.get_close_matches(key.upper(), KNOWN, n=1, cutoff=TYPO)
    return near[0] if near else None


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
            yield f"{count.where}: NUMBER_OF_NODES is {count.text!r}; give {FORM}"
    if nodes is not None and rank is not None and rank >= nodes:
        yield (
            f"{values['NODE_RANK'].where}: NODE_RANK is {rank}, but NUMBER_OF_NODES is {nodes}: "
            f"ranks go from 0 to {nodes - 1}"
        )
    if (address := values.get("MASTER_ADDR")) and (wrong := wrong_name(address.text)):
        yield f"{address.where}: MASTER_ADDR: {wrong}"
