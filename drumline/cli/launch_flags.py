"""The flags of `drumline launch`, by the place each belongs to, and what is wrong with a set of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from drumline.cli.launch_program import is_script
from drumline.cli.launch_slurm import OF_SLURM, wrong_for_slurm
from drumline.config import Flags
from drumline.config.flags import REPEATED
from drumline.config.schema import Bounds, Count, CountOrZero
from drumline.launch.hosts import wrong_counts
from drumline.launch.hosts import wrong_name as wrong_host
from drumline.launch.kubernetes import wrong_object_name
from drumline.launch.node.guard import GRACE_S
from drumline.launch.node_plan import (
    DEFAULT_PORT,
    JOIN_TIMEOUT_S,
    LAST_CALL_S,
    LOST_AFTER_S,
    SCRIPT_RESTARTS,
    TASK_RESTARTS,
)
from drumline.launch.rank_environment import DEFAULT_ON_HANG
from drumline.launch.ssh.hosts_job import NAMES, PREFIXES

# Its type, what stands for the value in the help, and the help.
FlagTable = Mapping[str, tuple[Any, str, str]]
ANYWHERE: FlagTable = {
    "procs": (Count, "N", "Ranks of each node [one per GPU, or 1; with --kubernetes 1]."),
    "max-restarts": (
        CountOrZero,
        "N",
        f"How often failed ranks are started again [{TASK_RESTARTS} for a task, which goes on from its newest "
        f"checkpoint; {SCRIPT_RESTARTS} for a script, which may begin anew each time].",
    ),
    "grace": (
        Annotated[float, Bounds(low=0)],
        "SECONDS",
        f"How long ranks that are asked to end (SIGTERM) may take, to save what they have [{GRACE_S:g}].",
    ),
    "print": (bool, "", "Show the torchrun line of each node, or the batch file, and start nothing."),
    "help": (bool, "", "Show this text."),
}
FROM_FILE: FlagTable = {
    "env-file": (
        str,
        "FILE",
        "Which node this is, and where the others are: NUMBER_OF_NODES, NODE_RANK, NUMBER_OF_GPUS, MASTER_ADDR and "
        "MASTER_PORT; if wanted DDP_TIMEOUT_SECONDS, DATASET_DIR and OUTPUT_DIR; and whatever else the ranks' "
        "environment shall hold.",
    ),
}
BY_HAND: FlagTable = {
    "node-rank": (CountOrZero, "K", "The same without a file: this is node K of --nodes."),
    "master": (str, "ADDR[:PORT]", f"Where the nodes meet: node 0, as all know it [port {DEFAULT_PORT}]."),
    "address": (str, "ADDR", "What the other nodes call this one [the way to the master tells]."),
}
OF_NODES: FlagTable = {
    "nnodes": (
        str,
        "MIN:MAX",
        "Go on with MIN nodes when others are missing [all are needed]; MAX is the number of hosts, or "
        "NUMBER_OF_NODES, and may be left out. Who is missing is said loudly.",
    ),
    "join-timeout": (Count, "SECONDS", f"How long nodes wait for each other [{JOIN_TIMEOUT_S}]."),
    "last-call": (
        CountOrZero,
        "SECONDS",
        f"How long MIN nodes wait for the rest before they go on without [{LAST_CALL_S}].",
    ),
    "lost-after": (Count, "SECONDS", f"A node that was not heard for so long is gone [{LOST_AFTER_S}]."),
}
OF_WATCH: FlagTable = {
    "watch": (
        bool,
        "",
        "Watch a script that knows nothing of Drumline: who holds up the ranks is told, with what it does.",
    ),
    "on-hang": (
        Literal["restart", "stop", "report"],
        "restart | stop | report",
        "What then follows: all ranks are ended and started again, as often as --max-restarts allows; or ended; "
        f"or it is only told [{DEFAULT_ON_HANG}].",
    ),
    "hang-after": (
        Annotated[float, Bounds(above=0)],
        "SECONDS",
        "How long what may be innocent (a download, a slow disk) may keep the other ranks waiting before that follows "
        "[for ever: it is only reported]; what cannot continue by itself is not waited for.",
    ),
}
OF_HOSTS: FlagTable = {
    "hosts": (str, "A,B:4,C", "On these hosts, over ssh; each with its number of ranks if they differ."),
    "hostfile": (str, "FILE", "The same from a file, one on a line: `host` or `host slots=N`."),
    "spare": (
        str,
        "D,E",
        "Hosts that take the place of one that is lost or unreachable, in this order, with as many ranks as it has "
        "or as given (`D:4`).",
    ),
    "standby": (
        bool,
        "",
        "Keep a process beside each rank of a task that has loaded torch and waits, so that a restart takes seconds "
        "less; with --hosts also an agent per host with such processes of its own, for when the first is lost [on; "
        "about 150 MB of memory each].",
    ),
    "port": (
        Annotated[int, Bounds(low=1, high=65535)],
        "N",
        f"Where the hosts meet, on the first of them [{DEFAULT_PORT}].",
    ),
    "ssh": (str, "WORDS", "How to call OpenSSH's client [DRUMLINE_SSH, or ssh], such as 'ssh -F file'."),
    "python": (str, "PATH", "The Python to run on the hosts [the one that runs this]."),
    "env": (
        REPEATED,
        "NAME | NAME=VALUE",
        "A variable for the ranks' environment, from here or as given; may be repeated. Those that begin with "
        f"{', '.join(PREFIXES)} go along anyway, and {', '.join(NAMES)}.",
    ),
    "sync": (bool, "", "First copy the current folder to the same place on every host, with rsync."),
    "exclude": (REPEATED, "PATTERN", "With --sync: leave out what has this name or path; may be repeated."),
    "logs": (str, "DIR", "Where the output of ranks is kept, on each host [runs/launch/TIME-JOB]."),
}
OF_KUBERNETES: FlagTable = {
    "kubernetes": (bool, "", "Write a manifest for kubectl; nothing is applied unless --apply is given."),
    "api": (
        Literal["v2", "v1", "job"],
        "v2 | v1 | job",
        "Kubeflow's TrainJob, its older PyTorchJob, or a plain indexed Job with a headless Service [v2].",
    ),
    "image": (
        str,
        "IMAGE",
        "The container image; it holds the code, and drumline for a task or with --nnodes.",
    ),
    "name": (str, "NAME", "What the job is called in the cluster [after the task or script]."),
    "namespace": (str, "NAME", "The namespace it belongs to [kubectl's own]."),
    "claim": (str, "NAME", "A PersistentVolumeClaim for run folders, mounted at /runs in every pod."),
    "apply": (bool, "", "Hand the manifest to `kubectl apply`, in kubectl's own context."),
}
OF_CLUSTERS: FlagTable = {
    "nodes": (Count, "N", "Nodes of a Slurm job, pods, or with --node-rank the nodes of the job [1]."),
    "gpus": (
        CountOrZero,
        "N",
        "GPUs of each [Slurm: as the partition has it; pods: one per rank, 0 for none].",
    ),
    "out": (str, "FILE", "Where to write the manifest [the screen] or the batch file [NAME.sbatch]."),
}
# As the help shows them.
GROUPS: Mapping[str, FlagTable] = {
    "anywhere": ANYWHERE,
    "watch  Over a script; a task is watched by itself (--watch.on_hang).": OF_WATCH,
    "on other hosts  One command, over ssh; it shows and ends the whole job.": OF_HOSTS,
    "by hand  One node of a job; the same command is typed on each.": {**FROM_FILE, **BY_HAND},
    "several nodes  How few will do, and how long they wait for each other.": OF_NODES,
    "Slurm  A batch job, which goes on after preemption and time limits.": OF_SLURM,
    "Kubernetes  A manifest.": OF_KUBERNETES,
    "Slurm and Kubernetes": OF_CLUSTERS,
}
OWN_FLAGS: FlagTable = {name: flag for table in GROUPS.values() for name, flag in table.items()}
WHERES = ("env-file", "node-rank", "hosts", "hostfile", "kubernetes", "slurm", "srun")


def wrong_flags(flags: Flags) -> Iterator[str]:
    """Every mistake, as a sentence."""
    yield from flags.layer.problems
    given = flags.own
    wheres = [name for name in WHERES if name in given and given[name] is not False]
    if len(wheres) > 1:
        yield (
            " and ".join(f"--{name}" for name in wheres) + " exclude each other: each says where the job runs"
        )
    if "env-file" in wheres and "procs" in given:
        yield "--procs: NUMBER_OF_GPUS in the --env-file says how many ranks this node has"
    if "kubernetes" in wheres:
        yield from _wrong_for_kubernetes(given)
    else:
        yield from (
            f"--{name}: belongs to --kubernetes"
            for name in OF_KUBERNETES
            if name in given and name != "kubernetes"
        )
    if "slurm" in wheres:
        yield from wrong_for_slurm(given)
    else:
        yield from (
            f"--{name}: belongs to --slurm" for name in OF_SLURM if name in given and name not in WHERES
        )
    if not {"slurm", "kubernetes"} & set(wheres):
        own = () if "node-rank" not in wheres else ("nodes",)
        others = (name for name in OF_CLUSTERS if name in given and name not in own)
        yield from (f"--{name}: belongs to --kubernetes and --slurm" for name in others)
    yield from (
        _wrong_by_hand(given)
        if "node-rank" in wheres
        else (f"--{name}: belongs to --node-rank" for name in BY_HAND if name in given)
    )
    if "srun" in wheres and given.get("print"):
        yield "--print: --srun is for srun to run"
    has_hosts = "hosts" in wheres or "hostfile" in wheres
    if not wheres:
        yield from (f"--{name}: is for a job on several nodes" for name in OF_NODES if name in given)
    elif "nnodes" in given and (wrong := wrong_counts(given["nnodes"])):
        yield wrong
    if not has_hosts:
        yield from (f"--{name}: belongs to --hosts and --hostfile" for name in OF_HOSTS if name in given)
    elif "exclude" in given and not given.get("sync"):
        yield "--exclude: belongs to --sync"


def _wrong_by_hand(given: Mapping[str, Any]) -> Iterator[str]:
    num_nodes = given.get("nodes", 1)
    if given["node-rank"] >= num_nodes:
        yield f"--node-rank: {given['node-rank']} of --nodes {num_nodes}: they are counted from 0 to {num_nodes - 1}"
    host, _, port = given.get("master", "").partition(":")
    if num_nodes > 1 and (wrong := wrong_host(host)):
        yield f"--master: {wrong}"
    if port and not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        yield f"--master: {port!r} is no port"


def _wrong_for_kubernetes(given: Mapping[str, Any]) -> Iterator[str]:
    if "image" not in given:
        yield "--image: is missing; a pod needs a container image, which holds the code"
    if "grace" in given:
        yield "--grace: a pod's own terminationGracePeriodSeconds says that"
    waits = ("join-timeout", "last-call", "lost-after")
    yield from (f"--{name}: is not for --kubernetes" for name in waits if name in given)
    if given.get("print"):
        yield "--print: --kubernetes writes a manifest, and starts nothing without --apply"
    for name in (name for name in ("name", "namespace", "claim") if name in given):
        if wrong := wrong_object_name(f"--{name}", given[name]):
            yield wrong


def wrong_target(flags: Flags, target: str | None) -> Iterator[str]:
    """What is wrong with the TASK or SCRIPT.py, as far as it can be seen from here."""
    if target is None:
        if not flags.layer.problems:  # a flag that is not known may have taken the name for its value
            yield "no TASK or SCRIPT.py was given"
        return
    yield from _wrong_watch(flags.own, target)
    if is_script(target) and _starts_here(flags) and not Path(target).is_file():
        yield f"there is no file {target} (looked in {Path.cwd()})"


def _wrong_watch(given: Mapping[str, Any], target: str) -> Iterator[str]:
    named = [name for name in OF_WATCH if name in given]
    if not is_script(target):
        settings = {"watch": "on_hang", "on-hang": "on_hang", "hang-after": "hang_s"}
        for name in named:
            yield f"--{name}: a task is watched by itself; behind its name --watch.{settings[name]} says how"
        return
    if not given.get("watch"):
        yield from (f"--{name}: belongs to --watch" for name in named if name != "watch")
    elif given.get("kubernetes"):
        yield "--watch: is not for --kubernetes"
    elif given.get("print") and not given.get("slurm"):
        yield "--print: torchrun alone does not watch a script; leave --watch out"


def _starts_here(flags: Flags) -> bool:
    return not flags.own.get("kubernetes") and not flags.own.get("print")
