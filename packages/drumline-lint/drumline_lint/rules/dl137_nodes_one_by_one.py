"""DL137: a script waits for a node before it starts the next."""

from __future__ import annotations

import re
from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.reading.launchers import Launch, launches
from drumline_lint.reading.rendezvous import most_nodes, nodes_flag
from drumline_lint.reading.shell import Script

RULE = rule("DL137")
_DETACHES = re.compile(r"\s-f\b|\s-\w*f\w*n\b|nohup|tmux|screen|setsid|docker run .*-d\b|--detach")


def check_shell(script: Script) -> Iterator[Finding]:
    remote = [launch for launch in launches(script) if _is_of_several(launch)]
    for launch in remote:
        text = script.text[launch.command.start : launch.name[0].start]
        is_detached = launch.command.is_background or _DETACHES.search(text) is not None
        if not is_detached and (launch.command.loop or launch is not remote[-1]):
            by = launch.command.words[0].plain or "the script"
            message = f"{by} waits for {launch.kind}, which waits for the nodes that come after it"
            yield RULE.at(script, launch.command.words[0], message)
            return


def _is_of_several(launch: Launch) -> bool:
    is_ssh = launch.is_elsewhere and launch.command.words[0].plain == "ssh"
    is_step = launch.srun is not None and "nodelist" in launch.srun.by_name
    has_several = nodes_flag(launch) in launch.flags and most_nodes(launch) != 1
    # Only one of the commands in an if is run.
    is_branch = launch.command.is_conditional and not launch.command.loop
    return (is_ssh or is_step) and has_several and not is_branch
