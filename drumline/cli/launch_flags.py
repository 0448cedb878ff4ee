"""The flags of `drumline launch`, grouped by launcher, and every mistake in a combination of
them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

from drumline.base.rank_environment import DEFAULT_ON_HANG, LOST_AFTER_S
from drumline.cli.cloud_file import FORMATS, OF_FILES, wrong_for_file
from drumline.cli.command_line import HELP_FLAG, misplaced
from drumline.cli.kubernetes_file import EFA, OF_KUBERNETES, wrong_for_kubernetes
from drumline.cli.launch_request import is_script
from drumline.config import Flags, FlagTable, FlagValues, switch
from drumline.config.flags import REPEATED
from drumline.config.rules import (
    FIRST_PROFILED,
    METRICS_FORM,
    metrics_endpoint,
    profiled_steps,
)
from drumline.config.schema import Count, CountOrZero, NotNegative, Port, Positive, SwitchOr
from drumline.launch.hosts import wrong_counts
from drumline.launch.kubernetes import GRACE_S
from drumline.launch.kubernetes import JOIN_TIMEOUT_S as PODS_JOIN_S
from drumline.launch.node.guard import DEFAULT_GRACE_S
from drumline.launch.node_plan import (
    DEFAULT_PORT,
    JOIN_TIMEOUT_S,
    LAST_CALL_S,
    SCRIPT_RESTARTS,
    TASK_RESTARTS,
    wrong_endpoint,
)
from drumline.launch.slurm import (
    CONTAINER,
    MAX_REQUEUES,
    OF_SBATCH,
    SIGNAL_BEFORE_S,
    wrong_flag_words,
    wrong_values,
)
from drumline.launch.ssh.hosts_job import NAMES, PREFIXES

ANYWHERE: FlagTable = {
    "procs": (Count, "N", "Ranks of each node [one per GPU, or 1; with --kubernetes 1]."),
    "max-restarts": (
        CountOrZero,
        "N",
        "How often failed ranks are restarted without getting any further: a job that makes progress is never given up "
        f"[{TASK_RESTARTS} for a task, which resumes from its newest checkpoint; "
        f"{SCRIPT_RESTARTS} for a script, which may start over each time].",
    ),
    "keep-going": switch(
        "Unattended, for a task here or with --hosts: resume by itself after a preemption that left the hosts usable, "
        "and after a full disk when there is space again. A signal to the launch itself still ends it."
    ),
    "grace": (
        NotNegative,
        "SECONDS",
        f"How long ranks may take to exit after a SIGTERM [{DEFAULT_GRACE_S:g}; in pods {GRACE_S:g}].",
    ),
    "print": (
        Annotated[bool | str, SwitchOr("skypilot | parallelcluster", "|".join(FORMATS))],
        "[skypilot | parallelcluster]",
        "Start nothing: show the torchrun line of each node, or the batch file; or write a file for SkyPilot or AWS "
        "ParallelCluster.",
    ),
    **HELP_FLAG,
}
OF_WATCH: FlagTable = {
    "watch": switch(
        "Watch a script that does not use Drumline: report which rank blocks the others, and where."
    ),
    "on-hang": (
        Literal["restart", "stop", "report"],
        "restart | stop | report",
        f"When ranks hang: end and restart all of them (--max-restarts), end them, or report it [{DEFAULT_ON_HANG}].",
    ),
    "hang-after": (
        Positive,
        "SECONDS",
        "How long a rank that may still continue (a download, a slow disk) may block the others before --on-hang is "
        "applied [no limit: it is only reported]; a rank that cannot continue (it is stopped) is handled at once.",
    ),
    "prometheus": (
        str,
        "[ADDRESS:]PORT",
        "Serve each node's metrics at /metrics of this port of its loopback, or of an address; needs the extra "
        "prometheus.",
    ),
}
OF_PROFILE: FlagTable = {
    "profile": (
        str,
        "FIRST:LAST",
        "Profile these steps on every rank, as in 10:20, and show where their time goes.",
    ),
    "profile-to": (str, "DIR", "The folder of the profile [runs/profile/NAME-TIME]."),
    "profile-only": switch("End the script after these steps."),
}
OF_HOSTS: FlagTable = {
    "hosts": (
        str,
        "A,B:4,C",
        "Run on these hosts, over ssh; with their numbers of ranks where these differ.",
    ),
    "hostfile": (
        str,
        "FILE",
        "The same from a file, one on a line: `host`, and where they differ slots=N, address=A, user=U, python=P and "
        "folder=F.",
    ),
    "addresses": (
        str,
        "A,B",
        "Where the hosts reach each other, in their order [their names, or the addresses at which ssh reaches them].",
    ),
    "detach": switch(
        "Hand the job to its hosts and return: it runs on without this machine, and after a reboot of a host. "
        "drumline jobs, attach and stop work from any machine. For a task it implies --keep-going."
    ),
    "spare": (
        str,
        "D,E:4",
        "Hosts that replace a lost or unreachable one, with its number of ranks, or as given.",
    ),
    "standby": switch(
        "Keep a standby process for each rank of a task, with torch loaded: a restart takes seconds less "
        "[on; about 150 MB of memory each]."
    ),
    "port": (Port, "N", f"The rendezvous port, on the first host [{DEFAULT_PORT}]."),
    "ssh": (
        str,
        "COMMAND",
        "How to call OpenSSH's client [DRUMLINE_SSH, or ssh], such as 'ssh -F file'.",
    ),
    "python": (
        str,
        "PATH",
        "The Python to run on the hosts, or in a Slurm job [the one that runs this; in a --container python3].",
    ),
    "env": (
        REPEATED,
        "NAME | NAME=VALUE",
        "A variable for the ranks' environment, from here or as given; may be repeated. Over ssh those that begin with "
        f"{', '.join(PREFIXES)} are passed on anyway, and {', '.join(NAMES)}. "
        "In a manifest its values can be read: none of them may be secret.",
    ),
    "sync": switch("First copy the current folder to the same path on every host, with rsync."),
    "exclude": (
        REPEATED,
        "PATTERN",
        "With --sync: skip files of this name or path; may be repeated.",
    ),
    "logs": (
        str,
        "DIR",
        "The folder for the output of ranks, on each host [runs/launch/TIME-JOB].",
    ),
}
BY_HAND: FlagTable = {
    "env-file": (
        str,
        "FILE",
        "A file that describes this node and the job: NUMBER_OF_NODES, NODE_RANK, NUMBER_OF_GPUS, MASTER_ADDR and "
        "MASTER_PORT; optionally DDP_TIMEOUT_SECONDS, DATASET_DIR and OUTPUT_DIR; and any other variables for the "
        "ranks' environment.",
    ),
    "node-rank": (CountOrZero, "K", "The same without a file: this is node K of --nodes."),
    "master": (
        str,
        "ADDR[:PORT]",
        f"The address of node 0, where the rendezvous is [port {DEFAULT_PORT}].",
    ),
    "address": (
        str,
        "ADDR",
        "The address at which other nodes reach this one [the one on its route to the master].",
    ),
}
OF_NODES: FlagTable = {
    "nnodes": (
        str,
        "MIN:MAX",
        "Continue with MIN nodes when others are missing [all are needed]; MAX is the number of hosts, or "
        "NUMBER_OF_NODES, and may be left out. A warning names the missing nodes.",
    ),
    "join-timeout": (
        Count,
        "SECONDS",
        f"How long nodes wait for each other [{JOIN_TIMEOUT_S}; pods {PODS_JOIN_S}].",
    ),
    "last-call": (
        CountOrZero,
        "SECONDS",
        f"How long MIN nodes wait for the others [{LAST_CALL_S}].",
    ),
    "lost-after": (
        Count,
        "SECONDS",
        f"A node that is cut off for less than this is not lost [{LOST_AFTER_S}]; with --nnodes the other nodes "
        "continue without one that sends no heartbeat for this long. For a task also its --watch.lost_s.",
    ),
}
OF_SLURM: FlagTable = {
    "slurm": switch("Write a batch file and submit it with sbatch; with --print only show it."),
    "partition": (str, "NAME", "The partition [the cluster's default]."),
    "time": (
        str,
        "T",
        "The time limit, as sbatch takes it: minutes, H:M:S, D-H:M:S [the partition's].",
    ),
    "account": (str, "NAME", "The account that is charged."),
    "qos": (str, "NAME", "The quality of service."),
    "cpus": (Count, "N", "Cores of each node [one for each rank of --procs or --gpus; pods 4]."),
    "mem": (str, "SIZE", "Memory of each node, as in 64G [pods: 16Gi for each rank]."),
    "job-name": (str, "NAME", "The name of the job and of its log [that of the task or script]."),
    "signal-before": (
        Count,
        "S",
        f"How long before the time limit the run is asked to save [{SIGNAL_BEFORE_S} s].",
    ),
    "max-requeues": (CountOrZero, "N", f"How often a preempted job is requeued [{MAX_REQUEUES}]."),
    "sbatch": (
        str,
        "FLAGS",
        "Any other flags of sbatch: --sbatch='--exclusive --constraint=a100'.",
    ),
    "srun-flags": (
        str,
        "FLAGS",
        "Any other flags of srun: --srun-flags='--mpi=none --cpu-bind=cores'.",
    ),
    "container": (
        str,
        "IMAGE | FOLDER",
        "Run the ranks in a container: an image as pyxis takes it (nvcr.io#nvidia/pytorch:25.01-py3, FILE.sqsh), "
        "with this folder mounted; or the folder of an OCI bundle (/images/train), for Slurm's own --container.",
    ),
    "setup": (
        str,
        "FILE",
        "Lines of bash that the job sources first: module load, conda activate.",
    ),
    "srun": switch(
        "In a batch file of your own: `srun --ntasks-per-node=1 drumline launch --srun ...`."
    ),
}
OF_CLUSTERS: FlagTable = {
    "nodes": (
        Count,
        "N",
        "Nodes of a Slurm job, pods, or with --node-rank the nodes of the job [1; in the cloud 2].",
    ),
    "gpus": (
        CountOrZero,
        "N",
        "GPUs of each [Slurm: the partition's default; pods: one per rank, 0 for none].",
    ),
    "out": (
        str,
        "FILE",
        "Where to write the manifest or file [the screen], or the batch file [NAME.sbatch].",
    ),
}
# As the help shows them.
GROUPS: Mapping[str, FlagTable] = {
    "anywhere": ANYWHERE,
    "watch  For a script; a task has its own watchdog (--watch.on_hang).": OF_WATCH,
    "profile  For a script; a task has --log.profile.": OF_PROFILE,
    "on other hosts  One command, over ssh; it shows and ends the whole job.": OF_HOSTS,
    "by hand  One node of a job; the same command is run on each.": BY_HAND,
    "several nodes  How many are needed, and how long they wait for each other.": OF_NODES,
    "Slurm  A batch job, which resumes after preemption and time limits.": OF_SLURM,
    "Kubernetes  A manifest.": OF_KUBERNETES,
    "cloud  A file for --print skypilot or --print parallelcluster; `drumline aws` makes a cluster itself.": OF_FILES,
    "Slurm, Kubernetes and cloud": OF_CLUSTERS,
}
OWN_FLAGS: FlagTable = {
    **{name: flag for table in GROUPS.values() for name, flag in table.items()},
    "efa": EFA,  # of pods and of ParallelCluster
}
WHERE = ("env-file", "node-rank", "hosts", "hostfile", "kubernetes", "slurm", "srun")
FILE = "print"
# Where the job must run for the flags of a table, and what is wrong elsewhere.
BELONGS: Sequence[tuple[FlagTable, frozenset[str], str]] = (
    (OF_KUBERNETES, frozenset({"kubernetes"}), "needs --kubernetes"),
    (OF_FILES, frozenset({FILE}), "needs --print skypilot or --print parallelcluster"),
    (OF_SLURM, frozenset({"slurm"}), "needs --slurm"),
    (OF_CLUSTERS, frozenset({"kubernetes", "slurm", FILE}), "needs --kubernetes or --slurm"),
    (BY_HAND, frozenset({"node-rank"}), "needs --node-rank"),
    (OF_NODES, frozenset({*WHERE, FILE}), "is for a job on several nodes"),
    (OF_HOSTS, frozenset({"hosts", "hostfile"}), "needs --hosts or --hostfile"),
)
# Flags that have a meaning in other places than those of their table.
ALSO: Mapping[str, Sequence[str]] = {
    "name": (FILE,),
    "nodes": ("node-rank",),
    "python": ("slurm",),
    "cpus": ("kubernetes",),
    "mem": ("kubernetes",),
    "env": ("kubernetes",),
    "efa": ("kubernetes", FILE),
}
NEEDS = {
    "exclude": "sync",
    "on-hang": "watch",
    "hang-after": "watch",
    "prometheus": "watch",
    "profile-to": "profile",
    "profile-only": "profile",
}
NOT_FOR: Mapping[str, Sequence[str]] = {
    "kubernetes": (
        "keep-going",
        "watch",
        "profile",
        "print",
    ),
    "slurm": ("keep-going", "profile"),
    "srun": ("keep-going", "print"),
    "env-file": ("keep-going",),
    "node-rank": ("keep-going",),
    "print": ("profile",),
    "detach": ("profile", "print"),
}
# Flags for scripts, and what a task has instead.
OF_SCRIPTS = {
    "watch": "--watch.on_hang",
    "on-hang": "--watch.on_hang",
    "hang-after": "--watch.hang_s",
    "prometheus": "--log.prometheus",
    "profile": "--log.profile FIRST:LAST",
    "profile-to": "--log.profile FIRST:LAST",
    "profile-only": "--log.profile FIRST:LAST",
}


def wrong_flags(flags: Flags) -> Iterator[str]:
    """Every mistake, as a message."""
    yield from flags.layer.problems
    verb_flags = flags.values

    def is_given(name: str) -> bool:
        return verb_flags.get(name, False) is not False

    where = set(filter(is_given, WHERE))
    if isinstance(verb_flags.get(FILE), str):
        where.add(FILE)
    if len(where) > 1:
        named = [f"--{name}" for name in WHERE if name in where]
        named += [f"--print {verb_flags[FILE]}"] if FILE in where else []
        yield f"{' and '.join(named)} exclude each other: each says where the job runs"
    for table, places, reason in BELONGS:
        if not places & where:
            own_names = [
                name for name in table if name not in WHERE and where.isdisjoint(ALSO.get(name, ()))
            ]
            yield from misplaced(verb_flags, own_names, reason)
    if "env-file" in where and "procs" in verb_flags:
        yield "--procs: NUMBER_OF_GPUS in the --env-file is the number of ranks of this node"
    if "kubernetes" in where:
        yield from wrong_for_kubernetes(verb_flags)
    if FILE in where:
        yield from wrong_for_file(verb_flags)
    if "slurm" in where:
        yield from _wrong_for_slurm(verb_flags)
    if "node-rank" in where:
        yield from _wrong_by_hand(verb_flags)
    if where and "nnodes" in verb_flags and (wrong := wrong_counts(verb_flags.nnodes)):
        yield wrong
    if "prometheus" in verb_flags and metrics_endpoint(verb_flags.prometheus) is None:
        yield f"--prometheus: it is {METRICS_FORM}"
    for name, needed in NEEDS.items():
        if not verb_flags.get(needed):
            yield from misplaced(verb_flags, [name], f"needs --{needed}")
    for launcher, names in NOT_FOR.items():
        if is_given(launcher):
            yield from (f"--{name}: is not for --{launcher}" for name in filter(is_given, names))


def _wrong_by_hand(verb_flags: FlagValues) -> Iterator[str]:
    """Of --node-rank."""
    num_nodes = verb_flags.get("nodes", 1)
    if verb_flags.node_rank >= num_nodes:
        yield f"--node-rank: {verb_flags['node-rank']} must be between 0 and {num_nodes - 1} (--nodes {num_nodes})"
    master = verb_flags.master
    has_master = num_nodes > 1 or master is not None
    if has_master and (wrong := wrong_endpoint(master or "")):
        yield f"--master: {wrong}"


def _wrong_for_slurm(verb_flags: FlagValues) -> Iterator[str]:
    """Values that a batch file cannot contain, and a file that is not there."""
    options = {name: verb_flags[name] for name in (*OF_SBATCH, "job-name") if name in verb_flags}
    yield from wrong_values(options)
    for name in ("sbatch", "srun-flags"):
        yield from wrong_flag_words(name, verb_flags.get(name, ""))
    container = verb_flags.container
    if container is not None and not CONTAINER.fullmatch(container):
        yield f"--container: {container!r} is not an image or a folder; no blanks, quotes and the like"
    if "setup" in verb_flags and not Path(verb_flags.setup).is_file():
        yield f"--setup: there is no file {verb_flags.setup} (looked in {Path.cwd()})"


def wrong_target(flags: Flags) -> Iterator[str]:
    """Every mistake in the TASK or SCRIPT.py that can be found before it is started."""
    verb_flags = flags.values
    if not flags.positional:
        # an unknown flag may have taken the name for its value
        if not flags.layer.problems:
            yield "no TASK or SCRIPT.py was given"
        return

    target = flags.positional[0]
    if not is_script(target):
        for name, setting in OF_SCRIPTS.items():
            if name in verb_flags:
                yield f"--{name}: is for scripts; give {setting} after the name of the task"
    elif verb_flags.keep_going:
        yield "--keep-going: is for tasks, which resume; a script may start from the beginning"

    steps = verb_flags.profile
    if steps is not None and profiled_steps(steps) is None:
        yield f"--profile: {steps!r} is not FIRST:LAST, as in 10:20, with FIRST at least {FIRST_PROFILED}"
    if verb_flags.print is True and verb_flags.watch and not verb_flags.slurm:
        yield "--print: shows torchrun alone, which does not watch a script; leave --watch out"

    starts_here = not verb_flags.kubernetes and not verb_flags.print
    if is_script(target) and starts_here and not Path(target).is_file():
        yield f"there is no file {target} (looked in {Path.cwd()})"
