"""DL137: a script waits for a node before it starts the next.

The first node waits at the rendezvous for the others, which are started only when it has ended.
"""

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
    """A command that starts one of several nodes, and ends only when the training ends.

    For example:

        ssh gpu1 torchrun --nnodes=2 --node-rank=0 train.py
        ssh gpu2 torchrun --nnodes=2 --node-rank=1 train.py
    """
    remote = [launch for launch in launches(script) if _is_of_several(launch)]
    for launch in remote:
        command = launch.command
        text = script.text[command.start : launch.name[0].start]
        if command.is_background or _DETACHES.search(text):
            continue

        if command.loop or launch is not remote[-1]:
            by = command.words[0].plain or "the script"
            message = f"{by} waits for {launch.kind}, which waits for the nodes that come after it"
            yield RULE.at(script, command.words[0], message)
            return


def _is_of_several(launch: Launch) -> bool:
    """Whether it starts one of several nodes: by ssh, or `srun --nodelist=gpu1`."""
    command = launch.command
    is_ssh = launch.is_elsewhere and command.words[0].plain == "ssh"
    is_step = launch.srun is not None and "nodelist" in launch.srun.by_name
    if not is_ssh and not is_step:
        return False

    # Only one of the commands in an if is run.
    if command.is_conditional and not command.loop:
        return False

    return nodes_flag(launch) in launch.flags and most_nodes(launch) != 1
