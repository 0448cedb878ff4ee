"""DL101: torchrun on several nodes that does not say which job it belongs to."""

from __future__ import annotations

from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.reading.launchers import Launch, launches
from drumline_lint.reading.rendezvous import DYNAMIC_BACKENDS, backend, most_nodes
from drumline_lint.reading.shell import Script

RULE = rule("DL101")


def check_shell(script: Script) -> Iterator[Finding]:
    for launch in launches(script):
        if _has_no_id(launch):
            message = (
                f"torchrun joins several nodes by {backend(launch)} without --rdzv-id: every job at this "
                "endpoint is called `none`, and a second one mixes with the first"
            )
            yield RULE.at(script, launch.flags["nnodes"].word, message)


def _has_no_id(launch: Launch) -> bool:
    if not launch.is_torchrun or not launch.is_sure or "standalone" in launch.flags:
        return False
    has_several = "nnodes" in launch.flags and most_nodes(launch) != 1
    return has_several and "rdzv-id" not in launch.flags and backend(launch) in DYNAMIC_BACKENDS
