"""DL118: every node computes an address, a port or an id of its own."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from drumline_lint.findings import Finding, rule
from drumline_lint.reading.allocation import started_on_nodes
from drumline_lint.reading.launchers import PYTHON, Launch, launches
from drumline_lint.reading.rendezvous import (
    first_node,
    least_nodes,
    nodes_flag,
    port_flag,
    variable,
)
from drumline_lint.reading.shell import Assignment, Script, TextRange
from drumline_lint.reading.shell_parser import Word, inside_quotes

RULE = rule("DL118")

_OWN = re.compile(
    r"\$\(\s*(?:hostname|uname -n)\b[^)|]*\)|`(?:hostname|uname -n)\b[^`|]*`"
    r"|\$(?:HOSTNAME|SLURMD_NODENAME|POD_IP|MY_POD_IP|RANDOM)\b"
    r"|\$\{(?:HOSTNAME|SLURMD_NODENAME|POD_IP|MY_POD_IP|RANDOM)\}"
    r"|\$\([^;]*?\b(?:RANDOM|shuf|uuidgen|mktemp)\b[^;]*"
    # containers and tasks do not begin in the same second
    r"|\$\(\s*date\b[^)]*%[sNST][^)]*\)"
)
_PROCESS_ID = re.compile(r"\$\$")
# Compose and Kubernetes write $$ for the sign itself.
_PROCESS_ID_IN_YAML = re.compile(r"\$\$\$\$")
# One shell evaluates the words for all nodes.
_OF_JOBS = re.compile(
    r"#SBATCH|SLURM_|PBS|#BSUB|LSB_|\b(?:srun|mpirun|mpiexec|ssh|pdsh|parallel|sbatch|qsub)\b"
)
_EVALUATED_BEFORE = re.compile(r"(?<!\\)[$`]")
_ON_NODES = {"srun", "ssh", "pdsh", "clush"}
# With one task on each node, both are the number of the node.
_RANKS_OF_TASK = {"SLURM_NODEID", "SLURM_PROCID"}
_NAME = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)(?::?-[^{}]*)?\})")


def check_shell(script: Script) -> Iterator[Finding]:
    """A word of the rendezvous that each node computes for itself.

    For example:

        ssh gpu1 'torchrun --nnodes=2 --rdzv-endpoint=$(hostname):29500 train.py'
    """
    for launch in launches(script):
        if not _is_on_each_node(launch):
            continue

        for place, what, word in _rendezvous_words(launch):
            if own_value := _own_value(launch, place, word):
                message = (
                    f"every node computes its own {what}, by {own_value.text}: "
                    "they do not find each other"
                )
                yield RULE.at(script, own_value.place, message)
                break


# Who evaluates the words


def _is_on_each_node(launch: Launch) -> bool:
    """Whether each of several nodes evaluates the words, or a part of them."""
    is_first = launch.is_elsewhere and launch.value("node-rank") == "0"
    if is_first or not _is_for_several(launch):
        return False

    is_started_on_each = launch.srun is not None or launch.is_elsewhere
    if is_started_on_each and launch.is_expanded_late:
        return True
    if _code_for_nodes(launch) is not None:
        return True
    return _is_in_yaml(launch) or _is_by_hand(launch) or _is_in_task(launch)


def _is_for_several(launch: Launch) -> bool:
    """Whether it is for more than one node, also for as many as a loop goes over.

    For example:

        for host in "${HOSTS[@]}"; do ssh $host "torchrun --nnodes=${#HOSTS[@]} train.py" & done
    """
    expected = least_nodes(launch) if launch.kind != PYTHON else None
    if max(expected or 1, started_on_nodes(launch) or 1) > 1:
        return True

    is_open = nodes_flag(launch) in launch.flags and expected is None
    is_in_loop = launch.is_elsewhere and launch.command.loop != ""
    return is_open and (is_in_loop or _is_in_task(launch))


def _code_for_nodes(launch: Launch) -> Script | None:
    """The code in double quotes that srun or ssh runs. The script evaluates it, but for what is
    behind a backslash, which the node does.

    For example:

        ssh gpu2 "torchrun --nnodes=2 --master-addr=\\$(hostname) train.py"
    """
    if launch.is_expanded_late or launch.depth != 1:
        return None

    start = launch.name[0].start
    words = launch.command.words
    quoted = [word for word in words if word.start < start < word.end]
    starts_on_nodes = any(word.plain in _ON_NODES and word.start < start for word in words)
    inside = inside_quotes(launch.script.text, quoted[0]) if quoted and starts_on_nodes else None
    return launch.script.inner(*inside) if inside else None


def _is_in_yaml(launch: Launch) -> bool:
    """Whether a manifest or a Compose file starts it in containers."""
    return launch.script.container is not None and launch.script.container.kind != "image"


def _is_by_hand(launch: Launch) -> bool:
    """Whether the whole script is started on each node: nothing in it reaches the others.

    For example:

        torchrun --nnodes=2 --rdzv-endpoint=$1 train.py
    """
    script = launch.script
    if launch.srun is not None or launch.is_elsewhere or launch.command.loop:
        return False

    is_job = script.container is not None or _OF_JOBS.search(script.text) is not None
    return launch.is_torchrun and not is_job and launch.value("node-rank") is None


def _is_in_task(launch: Launch) -> bool:
    """Whether srun starts the whole script, as the rank of its node shows.

    For example:

        torchrun --nnodes=$SLURM_NNODES --node-rank=$SLURM_NODEID train.py
    """
    script = launch.script
    is_alone = launch.srun is None and not launch.is_elsewhere and script.container is None
    rank = launch.flags.get("node-rank")
    if not is_alone or script.outer is not None or script.sbatch.by_name or rank is None:
        return False

    return rank.value is not None and rank.value.variable in _RANKS_OF_TASK


# What they are


@dataclass(frozen=True)
class OwnValue:
    """What makes a word differ from node to node."""

    place: TextRange
    text: str


def _rendezvous_words(launch: Launch) -> Iterator[tuple[TextRange, str, Word]]:
    """The words that all nodes must have the same, each with its place and what it is."""
    if address := first_node(launch):
        place, word = address
        yield place, "address", word

    flags = {"port": port_flag(launch), "rendezvous id": launch.flags.get("rdzv-id")}
    for what, flag in flags.items():
        if flag is not None and flag.value is not None:
            yield flag.word, what, flag.value

    port = variable(launch, "MASTER_PORT") if launch.kind == PYTHON else None
    if port is not None:
        yield port, "port", port.value


def _own_value(launch: Launch, place: TextRange, word: Word, depth: int = 0) -> OwnValue | None:
    """What a node computes for itself in a word, or in the only value of a variable in it.

    `$(hostname)` of `--rdzv-endpoint=$HOST:29500`, after:

        HOST=$(hostname)
    """
    process_id = _PROCESS_ID_IN_YAML if _is_in_yaml(launch) else _PROCESS_ID
    text = _part_of_nodes(word) if _code_for_nodes(launch) is not None else word.text
    if computed := _OWN.search(text) or process_id.search(text):
        return OwnValue(place, computed[0])

    for names in _NAME.findall(text):
        assigned = _assigned(launch, "".join(names))
        if len(assigned) != 1 or assigned[0].is_conditional or depth > 3:
            continue

        is_of_pod = assigned[0].command is None
        value_place = assigned[0] if is_of_pod else place
        return _own_value(launch, value_place, assigned[0].value, depth + 1)
    return None


def _part_of_nodes(word: Word) -> str:
    """What a node evaluates: `$(hostname)` of `\\$(hostname):$PORT`, and nothing of `$PORT`."""
    return _EVALUATED_BEFORE.sub("", word.text).replace("\\$", "$")


def _assigned(launch: Launch, name: str) -> list[Assignment]:
    """What a variable is set to: a batch script computes it once, for all nodes; each pod has its
    own."""
    scope: Script | None = _code_for_nodes(launch) or launch.script
    while scope is not None:
        if name in scope.variables:
            return scope.variables[name]

        scope = scope.outer if scope.container is not None else None
    return []
