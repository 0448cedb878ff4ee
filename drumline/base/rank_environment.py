"""What a rank's environment holds: which rank it is, from the variables of its launcher, which no
rank reads elsewhere, and what our launcher adds; and the failure record that a rank leaves for its
launcher.

torchrun sets RANK and the rest, and so do most other launchers. Slurm's srun has other names, which
are translated here, so that no other module depends on the launcher.

Ours adds when the user's command began, a file for each rank of each start (what a rank prints is for people,
what it writes there is for the launcher), a folder for the watchdog, and the settings of a script's
watchdog.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from drumline.base.errors import Place, PreflightError, UsageError
from drumline.base.job_secret import derived, secret_from
from drumline.base.untrusted import from_json, read_json, replace_text, whole_number

Environment = Mapping[str, str]
NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
# The number of processes, as Open MPI and MPICH set it.
OF_MPI = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
FIRST_REPORT_S = 1.0
# Of the rendezvous in a step of srun.
FIRST_PORT = 20_000
NUM_PORTS = 20_000
RESTARTED = "DRUMLINE_RESTARTED"
# Distinguishes one start of a node's ranks from any other.
NODE_START = "DRUMLINE_NODE_START"
LAUNCH_START = "DRUMLINE_LAUNCH_START"
"""When the launcher of this node began, in Unix seconds."""
LOGS_SHOWN = "DRUMLINE_LOGS_SHOWN"
"""Set if the launcher also shows what ranks other than 0 write to their logs in the run folder."""
FAILURE_FILE = "DRUMLINE_FAILURE_FILE"
SAVED_FILE = "DRUMLINE_SAVED_FILE"
GRACE_S = "DRUMLINE_GRACE_S"
ERROR_FILE = "DRUMLINE_ERROR_FILE"
RANK_FILE = "DRUMLINE_RANK_FILE"
"""Where a rank writes its number when the group of nodes has changed; the launcher marks its lines
with that."""
COMMAND_START = "DRUMLINE_COMMAND_START"
WATCH_FOLDER = "DRUMLINE_WATCH_DIR"
WATCH_NODES = "DRUMLINE_WATCH_NODES"
SCRIPT_WATCH = "DRUMLINE_SCRIPT_WATCH"
"""How a script is watched (ScriptWatch), as JSON."""
LAUNCHER_LINK = "DRUMLINE_LAUNCHER_LINK"
"""A file in which the supervisor of a host writes from which hosts the launcher gets heartbeats
(LauncherLink)."""
DEFAULT_ON_HANG = "restart"
LOST_AFTER_S = 20
"""How long a host may be cut off before it is lost, as in `WatchConfig.lost_s`."""
# How to run without the watchdog, for messages.
WITHOUT_WATCH = "--watch.sidecar off; a script: launch it without --watch"


# Which rank this is


@dataclass(frozen=True)
class Topology:
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    master_addr: str = ""
    master_port: int = 0
    is_restart: bool = False
    """Whether the ranks of this node were restarted."""
    agent_hosts_store: bool = False
    """torchrun's agent runs the store; otherwise rank 0 does."""
    node_names: tuple[str, ...] = ()
    """The hosts in the order of their ranks, if the launcher sets them and all have the same number
    of ranks."""
    node_start: str = ""
    """Tells this start of the node's ranks from any other, if the launcher sets it."""
    secret: str | None = field(default=None, repr=False)
    """The secret that all ranks were given, or None (`base/job_secret.py`)."""

    @property
    def host(self) -> str:
        return socket.gethostname()


def own_variables() -> dict[str, str]:
    """A copy of this process's environment, for programs that are started with `python -m`."""
    return dict(os.environ)


def topology_from(environment: Environment) -> Topology | None:
    """This process's rank and job, or None when no launcher started it."""
    variables = {**rank_variables(environment), **environment}
    if "RANK" not in variables and "WORLD_SIZE" not in variables:
        _check_not_mpi(variables)
        return None
    if missing := [name for name in NEEDED if name not in variables]:
        present = ", ".join(f"{name}={variables[name]}" for name in NEEDED if name in variables)
        raise PreflightError(
            f"the launcher set {present} but not {', '.join(missing)}",
            next_step="start with torchrun or `drumline train --procs N`, or set all of "
            + ", ".join(NEEDED),
        )
    variables.setdefault("LOCAL_WORLD_SIZE", variables["WORLD_SIZE"])

    rank = _integer(variables, "RANK")
    world_size = _integer(variables, "WORLD_SIZE")
    if not 0 <= rank < world_size:
        raise PreflightError(
            f"RANK is {rank}, but WORLD_SIZE is {world_size}: ranks are 0 to {world_size - 1}"
        )
    return Topology(
        rank=rank,
        world_size=world_size,
        local_rank=_integer(variables, "LOCAL_RANK"),
        local_world_size=_integer(variables, "LOCAL_WORLD_SIZE"),
        master_addr=variables["MASTER_ADDR"],
        master_port=_integer(variables, "MASTER_PORT"),
        is_restart=variables.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
        or variables.get(RESTARTED) == "1",
        agent_hosts_store=variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        secret=secret_from(variables),
        node_start=variables.get(NODE_START, ""),
        node_names=tuple(filter(None, variables.get("DRUMLINE_NODE_NAMES", "").split(","))),
    )


def let_first_rank_report(topology: Topology | None) -> None:
    """Wait, on a rank that fails before the rendezvous: all ranks of a host have the same command,
    and most likely fail for the same reason. The first reports it and exits, and the launcher ends
    the others; otherwise they report it."""
    if topology is not None and topology.local_rank > 0:
        time.sleep(FIRST_REPORT_S)


def _check_not_mpi(variables: Environment) -> None:
    """mpirun uses other names, so each process would believe that it is the only one."""
    for name in OF_MPI:
        if variables.get(name, "1") != "1":
            raise PreflightError(
                f"mpirun has started several processes ({name}={variables[name]}), but none knows its rank",
                next_step=f"in each, set {', '.join(NEEDED)} (Open MPI's RANK is $OMPI_COMM_WORLD_RANK); or start "
                "them with drumline launch --hosts",
            )


def _integer(variables: Environment, name: str) -> int:
    try:
        return int(variables[name])
    except ValueError:
        raise UsageError(f"{name} is {variables[name]!r}, which is not a whole number") from None


# A step of srun


def rank_variables(environment: Environment) -> dict[str, str]:
    """RANK and the other variables for a task of an srun step; empty elsewhere (a batch script is
    not an srun step)."""
    is_step = "SLURM_PROCID" in environment and "SLURM_STEP_NODELIST" in environment
    if not is_step or int(environment.get("SLURM_STEP_NUM_TASKS", "1")) < 2:
        return {}
    node_list = environment["SLURM_STEP_NODELIST"]
    per_node = environment.get("SLURM_STEP_TASKS_PER_NODE", "1")
    # Hosts are in the order of their ranks only if each has the same number of ranks, in blocks.
    distribution = environment.get("SLURM_DISTRIBUTION", "block")
    in_blocks = "," not in per_node and distribution.startswith("block")
    return {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": environment["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": environment.get("SLURM_LOCALID", "0"),
        # `4(x2),3` means four tasks on each of two nodes and three on one more.
        "LOCAL_WORLD_SIZE": re.split(r"[(,]", per_node, maxsplit=1)[0],
        "MASTER_ADDR": first_host(node_list),
        "MASTER_PORT": str(rendezvous_port(environment)),
        "DRUMLINE_NODE_NAMES": ",".join(node_names(node_list)) if in_blocks else "",
    }


def rendezvous_port(environment: Environment) -> int:
    job = int(environment.get("SLURM_JOB_ID", "0"))
    step = int(environment.get("SLURM_STEP_ID", "0"))
    return FIRST_PORT + (job * 7 + step) % NUM_PORTS


def first_host(node_list: str) -> str:
    """The first name of Slurm's shorthand: `gpu[007-009,12],login` begins with `gpu007`."""
    return node_names(node_list)[0]


def node_names(node_list: str) -> list[str]:
    """`gpu[007-009,12],login` is gpu007, gpu008, gpu009, gpu12 and login."""
    names: list[str] = []
    # A comma inside brackets separates numbers, one outside names.
    for word in re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", node_list):
        match = re.fullmatch(r"([^\[]*)\[([\d,-]+)\](.*)", word)
        if match is None:
            names.append(word)
            continue
        prefix, numbers, suffix = match.groups()
        suffixes = node_names(suffix) or [""]
        for number in _padded_numbers(numbers):
            names += [f"{prefix}{number}{expanded}" for expanded in suffixes]
    return names


def _padded_numbers(numbers: str) -> Iterator[str]:
    """`007-009,12` is 007, 008, 009 and 12."""
    for interval in filter(None, numbers.split(",")):
        first, _, last = interval.partition("-")
        for number in range(int(first), int(last or first) + 1):
            yield str(number).zfill(len(first))


# What a rank leaves for our launcher


def _leave(environment: Environment, name: str, text: str) -> None:
    """Write the file that this variable names, if a launcher has set it."""
    if path := environment.get(name):
        with contextlib.suppress(OSError):
            replace_text(Path(path), text)


# How a rank failed


@dataclass(frozen=True)
class FailureRecord:
    """The first failure of the job, as one of its ranks knows it."""

    rank: int | None
    """The rank that failed first, which may not be the rank that writes this record."""
    step: int | None
    error: str
    is_own: bool
    """Whether the error is the rank's own, and not a result of another process's exit."""
    can_restart: bool
    """False: a restart would fail the same way."""
    full_disk: str = ""
    """The folder whose disk, or quota, is full, if that is why."""

    def repeats(self, before: FailureRecord | None) -> bool:
        """Whether the previous start failed in the same way, at the same step."""
        return self.is_own and self == before


def write_failure(environment: Environment, record: FailureRecord) -> None:
    """Does nothing under another launcher."""
    _leave(environment, FAILURE_FILE, json.dumps(asdict(record)))


def read_failure(path: Path) -> FailureRecord | None:
    """The record; None: the rank could not write it (it was killed), or is a script's."""
    return read_json(FailureRecord, path)


# Which rank a process is now


def write_rank(environment: Environment, rank: int) -> None:
    """Does nothing where no launcher shows the lines of ranks."""
    _leave(environment, RANK_FILE, str(rank))


def read_rank(path: Path) -> int | None:
    """None: the number is the one that the launcher gave."""
    try:
        return whole_number(path.read_text(encoding="ascii"))
    except (OSError, UnicodeDecodeError):
        return None


# How a rank was preempted


def grace_from(environment: Environment) -> float | None:
    """How many seconds after a SIGTERM the launcher kills this rank; None: another launcher, which
    does not say."""
    grace_s = environment.get(GRACE_S)
    return float(grace_s) if grace_s else None


def note_saved(environment: Environment) -> None:
    """Report to the launcher that the preempted run has saved: the same command resumes it,
    whatever ends this rank."""
    _leave(environment, SAVED_FILE, "")


# How a command failed


@dataclass(frozen=True)
class ErrorRecord:
    """What a command printed last, for the Python program that has started it (`python_api.py`)."""

    what: str
    next_step: str | None
    place: Place
    details: str = ""
    """The traceback of an error that is not ours."""


def write_error(environment: Environment, record: ErrorRecord) -> None:
    """Does nothing in a command that a user has typed. A later failure, after a restart, replaces
    an earlier one."""
    _leave(environment, ERROR_FILE, json.dumps(asdict(record)))


def read_error(path: Path) -> ErrorRecord | None:
    """None: the command could not write it."""
    return read_json(ErrorRecord, path)


# The watchdog


@dataclass(frozen=True)
class ScriptWatch:
    run: str | None = None
    """The folder for diagnoses; a task uses its run folder."""
    on_hang: str = DEFAULT_ON_HANG
    hang_s: float | None = None
    """None: a script that may still continue is never ended."""
    lost_s: float = float(LOST_AFTER_S)
    """How long an unreachable host is waited for."""
    prometheus: str = ""
    """Where metrics are served; empty: nowhere."""


@dataclass(frozen=True, kw_only=True)
class LauncherLink:
    """Which hosts of a job the launcher reaches: with it, the end of a cut link that is cut off is
    known."""

    is_cut_off: bool = False
    """Whether this host gets no heartbeat from the launcher."""
    silent_nodes: tuple[int, ...] = ()
    """The nodes from which the launcher gets no heartbeat, as it last reported."""
    num_nodes: int = 0

    def write(self, path: Path) -> None:
        replace_text(path, json.dumps(asdict(self)))


def read_launcher_link(path: str) -> LauncherLink | None:
    """None: no launcher over ssh has started this job, or all hosts send heartbeats so far."""
    return read_json(LauncherLink, Path(path)) if path else None


@dataclass(frozen=True, kw_only=True)
class WatchSettings:
    """What the launcher set for this rank's watchdog; under another launcher, nothing."""

    folder: Path | None = None
    """The watch folder of this node and this start."""
    secret: str | None = field(default=None, repr=False)
    nodes: tuple[tuple[str, int], ...] = ()
    """By node: the address, and the port that is reserved for its sidecar; empty on a single
    node."""
    script: ScriptWatch = field(default_factory=ScriptWatch)
    launcher_link: str = ""
    """Where the supervisor of this host writes a LauncherLink; empty: there is none."""


def sidecar_secret(secret: str | None, *start: str) -> str | None:
    """The secret of the sidecars of one start; `start` identifies it, where all starts share one
    secret."""
    return None if secret is None else derived(secret, "sidecars", *start)


def _watch_nodes(endpoints: str) -> Iterator[tuple[str, int]]:
    for endpoint in filter(None, endpoints.split(",")):
        address, _, port = endpoint.rpartition(":")
        yield address, int(port)


def watch_settings_from(environment: Environment) -> WatchSettings:
    """Only our own launcher sets these variables."""
    folder = environment.get(WATCH_FOLDER)
    script = environment.get(SCRIPT_WATCH)
    return WatchSettings(
        folder=Path(folder) if folder else None,
        secret=sidecar_secret(secret_from(environment)),
        nodes=tuple(_watch_nodes(environment.get(WATCH_NODES, ""))),
        script=from_json(ScriptWatch, json.loads(script)) if script else ScriptWatch(),
        launcher_link=environment.get(LAUNCHER_LINK, ""),
    )
