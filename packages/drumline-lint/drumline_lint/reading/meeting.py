"""Where the nodes of a torchrun meet, and how many there are, as far as its flags tell."""

from __future__ import annotations

from dataclasses import dataclass

from drumline_lint.reading.launches import Launch
from drumline_lint.reading.shell import Script, Span
from drumline_lint.reading.shell_parts import Kind, Word
from drumline_lint.reading.torchrun_flags import Flag

LOCAL = {"localhost", "127.0.0.1", "::1", "[::1]", "0.0.0.0"}  # noqa: S104
_DEEPEST = 8


@dataclass(frozen=True)
class Port:
    """The port in a word, or all that is known of it."""

    value: str | None
    """None where it is not known, or not given."""
    is_computed: bool
    """Whether the script works it out, as from the job's number."""
    source: Span
    """Where it is written."""


def flag_value(script: Script, launch: Launch, name: str) -> str | None:
    """The constant that a flag is given."""
    flag = launch.flags.get(name)
    return script.constant(flag.value) if flag and flag.value else None


def has_several_nodes(script: Script, launch: Launch) -> bool | None:
    """By --nnodes; None when only a run could tell."""
    if "standalone" in launch.flags:
        return False
    if "nnodes" not in launch.flags:
        return False if launch.is_sure else None
    most = (flag_value(script, launch, "nnodes") or "").rpartition(":")[2]
    return int(most) > 1 if most.isascii() and most.isdigit() else None


def backend(script: Script, launch: Launch) -> str | None:
    """How the nodes find each other; None when it is not known."""
    if "standalone" in launch.flags:
        return "c10d"
    if "rdzv-backend" not in launch.flags:
        return "static" if launch.is_sure else None
    return flag_value(script, launch, "rdzv-backend")


def endpoint(launch: Launch) -> Flag | None:
    """The flag that says where nodes meet."""
    return launch.flags.get("rdzv-endpoint")


def host_in(script: Script, word: Word) -> str | None:
    """Of `host:port`."""
    whole = script.constant(word)
    if whole is None:
        return word.head.rpartition(":")[0] if ":" in word.head else None
    return whole.rpartition(":")[0] if ":" in whole else whole


def port_in(script: Script, word: Word, depth: int = 0) -> Port:
    """Of `host:port`, where either may come from a variable."""
    pieces = word.pieces
    last = pieces[-1] if pieces else None
    if last is None:
        return Port(None, False, word)
    if len(pieces) == 1 and last.kind is Kind.VARIABLE:
        assigned = script.variables.get(last.text, [])
        if len(assigned) == 1 and depth < _DEEPEST:
            return port_in(script, assigned[0].value, depth + 1)
        return Port(None, bool(assigned), word)
    if last.kind is Kind.TEXT:
        _, colon, port = last.text.rpartition(":")
        return Port(port if colon else None, False, word)
    before = pieces[-2] if len(pieces) > 1 else None
    if before is None or before.kind is not Kind.TEXT or not before.text.endswith(":"):
        return Port(None, last.kind is not Kind.VARIABLE, word)
    return port_alone(script, Word(word.start, word.end, (last,)))


def port_alone(script: Script, word: Word) -> Port:
    """Of a word that is nothing but a port."""
    value = script.constant(word)
    names = [piece.text for piece in word.pieces if piece.kind is Kind.VARIABLE]
    is_assigned = any(script.variables.get(name) for name in names)
    has_unknown = any(piece.kind is Kind.UNKNOWN for piece in word.pieces)
    return Port(value, value is None and (is_assigned or has_unknown), script.source_of(word))
