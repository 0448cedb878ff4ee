"""DL027: the launcher's address is overwritten."""

from __future__ import annotations

from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.flow.hosts import (
    is_left_to_launcher,
    is_loopback,
    is_right_on_one_host,
    settings,
    written_text,
)
from drumline_lint.program.program import Program
from drumline_lint.reading.source import Source

RULE = rule("DL027")


def check(program: Program, source: Source) -> Iterator[Finding]:
    """One finding for each statement; a port beside an address that is computed belongs to that."""
    every = settings(program, source)
    address_is_computed = any(
        setting.name == "MASTER_ADDR" and not written_text(program, setting.value)
        for setting in every
    )
    reported = set()
    for setting in every:
        value = written_text(program, setting.value) or ""
        is_port = setting.name == "MASTER_PORT"
        if (
            not value
            or setting.name not in ("MASTER_ADDR", "MASTER_PORT")
            or setting.node in reported
        ):
            continue
        if is_left_to_launcher(program, setting.node) or (is_port and address_is_computed):
            continue
        if not (is_port or is_loopback(value)) or not is_right_on_one_host(program, setting.node):
            reported.add(setting.node)
            yield RULE.at(
                source,
                setting.node,
                f"{setting.name} is set to {value}, which overwrites the launcher's value",
            )
