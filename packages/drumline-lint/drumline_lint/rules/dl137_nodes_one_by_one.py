"""DL137: a script waits for a node before it starts the next."""

from __future__ import annotations

import re
from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.reading.job_settings import SIZE, job_setting, loop_ranks
from drumline_lint.reading.launchers import Launch, launches
from drumline_lint.reading.rendezvous import most_nodes, nodes_flag
from drumline_lint.reading.shell import Script

RULE = rule("DL137")
_DETACHES = re.compile(r"\s-f\b|\s-\w*f\w*n\b|nohup|tmux|screen|setsid|docker run .*-d\b|--detach")


def check_shell(script: Script) -> Iterator[Finding]:
    remote = [launch for launch in launches(script) if _is_of_several(launch)]
    in_front = [launch for launch in remote if not _is_detached(script, launch)]
    for launch in in_front:
        is_followed = launch.command.loop is not None or launch is not remote[-1]
        if is_followed:
            by = launch.command.words[0].plain or "the script"
            message = f"{by} waits for {launch.kind}, which waits for the nodes that come after it"
            yield RULE.at(script, launch.command.words[0], message)
            return


def _is_of_several(launch: Launch) -> bool:
    is_ssh = launch.is_elsewhere and launch.command.words[0].plain in {"ssh", "kubectl"}
    is_step = launch.srun is not None and "nodelist" in launch.srun.by_name
    if len(loop_ranks(launch)) > 1 and job_setting(launch, SIZE).value != "1":
        return True
    has_several = nodes_flag(launch) in launch.flags and most_nodes(launch) != 1
    return (is_ssh or is_step) and has_several and not _is_branch(launch)


def _is_branch(launch: Launch) -> bool:
    """Only one of the commands in an if is run."""
    return launch.command.is_conditional and launch.command.loop is None


def _is_detached(script: Script, launch: Launch) -> bool:
    text = script.text[launch.command.start : launch.name[0].start]
    return launch.command.is_background or _DETACHES.search(text) is not None
