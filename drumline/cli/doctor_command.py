"""`drumline doctor`: checks this machine, a task on it, or every pair of hosts, before a run."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from drumline.base.errors import ExitCode, UsageError
from drumline.base.job_secret import secret_from
from drumline.base.rank_environment import first_host
from drumline.base.startup import INTERRUPTED_EARLY, interruptible, loading
from drumline.base.text import print_message, show, show_lines, show_progress
from drumline.base.untrusted import whole_number
from drumline.cli.command_line import HELP_FLAG, check_command, check_no_rank, misplaced, show_help
from drumline.cli.train_command import CONFIG_FLAG, settle_before_torch
from drumline.config import Flags, FlagTable, FlagValues, Layers, read_flags, switch
from drumline.config.schema import Config, Count, CountOrZero, Port
from drumline.launch.hosts import listed_hosts
from drumline.launch.node_plan import DEFAULT_PORT, split_endpoint, wrong_endpoint
from drumline.launch.ssh.client import ssh_client
from drumline.tools.doctor.cluster import (
    DoctorOptions,
    DoctorResult,
    check_as_node_zero,
    check_over_ssh,
)
from drumline.tools.doctor.doctor_report import as_json, report
from drumline.tools.doctor.finding import Finding, has_problems
from drumline.tools.doctor.machine.machine_checks import machine_findings, num_visible_gpus
from drumline.tools.doctor.machine.machine_facts import HostSettings, host_facts
from drumline.tools.doctor.machine.summary import machine_rows
from drumline.tools.doctor.pairs import without_ssh as nodes
from drumline.tools.doctor.pairs.survey import Survey
from drumline.tools.doctor.ranks.rank_processes import (
    collectives_line,
    local_collectives,
    numbers_text,
)

if TYPE_CHECKING:
    from drumline.training.manager import RunManager
    from drumline.training.tasks.base import Task

WAIT_S = 10
BATCHES = 8
LABEL_WIDTH = len("CUDA_VISIBLE_DEVICES")
LISTS_OF_HOSTS: FlagTable = {
    "hosts": (str, "A,B:4,C", "Check these hosts and every pair of them."),
    "hostfile": (
        str,
        "FILE",
        "The same, with the hosts in a file: `host` or `host slots=N` on a line.",
    ),
}
OF_SSH: FlagTable = {
    "port": (
        Port,
        "N",
        f"The rendezvous port on the first host, which all must reach [{DEFAULT_PORT}].",
    ),
    "ssh": (str, "COMMAND", "How to call ssh, such as 'ssh -F file' [DRUMLINE_SSH, or ssh]."),
    "python": (str, "PATH", "Python on the hosts [the one that runs this]."),
}
SSH_FLAGS: FlagTable = {**LISTS_OF_HOSTS, **OF_SSH}
# As the help shows them.
GROUPS: Mapping[str, FlagTable] = {
    "anywhere": {
        "data": (str, "DIR", "The dataset's folder, compared across hosts [DATASET_DIR]."),
        "code": (
            str,
            "DIR",
            "The code's folder, compared across hosts [this folder, unless it is your home].",
        ),
        "run": (str, "DIR", "Where runs will be written: its disk is checked [this folder]."),
        "json": switch("Print everything as JSON, for scripts."),
        **HELP_FLAG,
    },
    "a task  On this machine, with the settings of `drumline train TASK`.": {
        "batches": (Count, "N", f"How many micro-batches to run through the loss [{BATCHES}]."),
        **CONFIG_FLAG,
    },
    "over ssh": SSH_FLAGS,
    "without ssh  The same command on each node: typed, by srun, or in pods.": {
        "nodes": (Count, "N", "The number of nodes [SLURM_NNODES]."),
        "node-rank": (
            CountOrZero,
            "K",
            "The rank of this node; node 0 runs the checks and reports [SLURM_NODEID].",
        ),
        "master": (
            str,
            "ADDR[:PORT]",
            f"Where node 0 is [the first host of the srun step; port {DEFAULT_PORT}].",
        ),
        "wait": (Count, "S", f"How many seconds nodes wait for each other [{WAIT_S}]."),
    },
    "a real process group  Values of collectives, and a step of DDP.": {
        "collectives": switch(
            "Run it at the end [on for several hosts]; --no-collectives skips it."
        ),
        "procs": (Count, "N", "Ranks of each host [one per GPU, or 1]."),
        "backend": (
            Literal["auto", "gloo", "nccl"],
            "auto | gloo | nccl",
            "[nccl on GPUs, else gloo]",
        ),
    },
}
OWN_FLAGS: FlagTable = {name: flag for table in GROUPS.values() for name, flag in table.items()}
OF_TASK = ("batches", "config")
OF_NODES = ("nodes", "node-rank", "master", "wait")
USAGE = """\
usage: drumline doctor [TASK] [flags] [--section.name value ...]

Checks whether this machine, a task, or every pair of hosts, is ready to train.
Nothing is changed.

  drumline doctor                              this machine, in seconds
  drumline doctor TASK                         and: which parameters are unused
  drumline doctor --hosts a,b,c                hosts, and every pair of them
  drumline doctor --nodes 2 --node-rank 0 --master a      without ssh, on each
  srun --ntasks-per-node 1 drumline doctor --nodes 2      the same, by Slurm

For every pair: names, the rendezvous port, data ports in both directions,
interfaces, large messages, latency, bandwidth, clocks. Then what differs
across hosts. Then, when no problem was found, a real process group.
"""
EXIT_CODES = """\
Without ssh, set DRUMLINE_SECRET to one value of 16 characters or more on all
nodes, so that no other process can join.

exit codes: 0 ready to train, 2 wrong usage, 3 something must be fixed,
            130 interrupted
"""


@dataclass(frozen=True, slots=True)
class TaskCheck:
    findings: list[Finding]
    row: str
    """For the screen."""
    document: dict[str, Any]
    """The same, for JSON."""


def run(argv: Sequence[str]) -> int:
    """A task, hosts over ssh, nodes without ssh, or this machine."""
    flags = read_flags(argv, OWN_FLAGS, max_positional=1)
    if not flags.positional:
        flags = read_flags(
            argv,
            OWN_FLAGS,
            no_settings="is a setting of a run; the doctor takes none without a TASK",
        )

    verb_flags = flags.values
    show_help(flags, GROUPS, USAGE, EXIT_CODES)
    check_command("doctor", _wrong_flags(flags))
    if flags.positional:
        return _check_task(flags)
    if lists_of_hosts(verb_flags):
        return _show(verb_flags, check_hosts(verb_flags, _options(verb_flags)))
    if any(name in verb_flags for name in OF_NODES):
        return _check_nodes(verb_flags)
    return _check_this_machine(verb_flags)


def _wrong_flags(flags: Flags) -> Iterator[str]:
    """Every mistake in a combination of flags."""
    yield from flags.layer.problems
    verb_flags = flags.values
    yield from wrong_hosts(verb_flags)
    with_ssh = lists_of_hosts(verb_flags)
    without = [name for name in OF_NODES if name in verb_flags]
    if flags.positional:
        yield from misplaced(verb_flags, [*with_ssh, *without], "a TASK is checked on this machine")
    else:
        yield from misplaced(verb_flags, OF_TASK, "belongs to a TASK")
    if with_ssh and without:
        yield f"--{with_ssh[0]} uses ssh, and --{without[0]} does not: give one of them"
    if not verb_flags.get("collectives", bool(with_ssh or without)):
        yield from misplaced(verb_flags, ("procs", "backend"), "belongs to --collectives")


def lists_of_hosts(verb_flags: FlagValues) -> list[str]:
    """The flags that list hosts and are given: --hosts or --hostfile."""
    return [name for name in LISTS_OF_HOSTS if name in verb_flags]


def wrong_hosts(verb_flags: FlagValues) -> Iterator[str]:
    """Every mistake in the flags over ssh."""
    lists = lists_of_hosts(verb_flags)
    if len(lists) > 1:
        yield "--hosts and --hostfile exclude each other: each lists the hosts"
    if not lists:
        yield from misplaced(verb_flags, OF_SSH, "belongs to --hosts and --hostfile")


def _check_task(flags: Flags) -> int:
    check_no_rank("doctor TASK")
    task, layers = settle_before_torch(flags)
    check = _run_batches(task, layers, num_batches=flags.values.get("batches", BATCHES))
    return _check_this_machine(flags.values, check)


def _run_batches(task: str, layers: Layers, *, num_batches: int) -> TaskCheck:
    """On this process alone. Where the task fails, its error is reported and the process exits."""
    with interruptible(INTERRUPTED_EARLY), loading():
        from drumline.cli.as_rank import with_task
        from drumline.tools.doctor.parameter_use import measure_use, use_findings

    checks: list[TaskCheck] = []

    def work(config: Config, task_class: type[Task], ddp: RunManager) -> None:
        use = measure_use(config, task_class, ddp, most=num_batches)
        findings = use_findings(use, config, task=task)
        checks.append(TaskCheck(findings, use.row(), {"name": task, **asdict(use)}))

    with_task(task, layers, work)
    return checks[0]


def check_hosts(verb_flags: FlagValues, options: DoctorOptions) -> DoctorResult:
    """Those of `--hosts` or `--hostfile`."""
    hosts = listed_hosts(verb_flags.hosts, verb_flags.hostfile)
    client = ssh_client(verb_flags.ssh, os.environ)
    python = verb_flags.get("python", sys.executable)
    port = verb_flags.get("port", DEFAULT_PORT)
    return asyncio.run(
        check_over_ssh(hosts, options, port=port, client=client, python=python, progress=show_step)
    )


def _check_nodes(verb_flags: FlagValues) -> int:
    """Without ssh: node 0 runs the checks, the others join it."""
    node = _node_options(verb_flags, os.environ)
    options = _options(verb_flags)
    if node.node == 0:
        return _show(verb_flags, asyncio.run(check_as_node_zero(node, options, show_step)))

    show_step(f"node {node.node} of {node.nodes} connects to {node.endpoint}")
    last = nodes.join(node, options.settings)
    show_step("")
    # Where srun merges the output of all nodes, stdout has only node 0's JSON.
    stream = sys.stderr if verb_flags.json else sys.stdout
    show_lines(
        [f"node {node.node}: {last.get('result', '')} (node 0 has the report)"], stream=stream
    )
    return int(last["code"])


def _node_options(verb_flags: FlagValues, environment: Mapping[str, str]) -> nodes.NodeOptions:
    """From the flags, or from what srun sets."""
    step_hosts = environment.get("SLURM_STEP_NODELIST")
    place: dict[str, Any] = {
        "--nodes": verb_flags.get("nodes", whole_number(environment.get("SLURM_NNODES", ""))),
        "--node-rank": verb_flags.get(
            "node-rank", whole_number(environment.get("SLURM_NODEID", ""))
        ),
        "--master": verb_flags.get("master", first_host(step_hosts) if step_hosts else None),
    }
    if missing := [name for name, value in place.items() if value is None]:
        raise UsageError(
            f"{' and '.join(missing)} {'are' if len(missing) > 1 else 'is'} missing",
            next_step="give --nodes N --node-rank K --master ADDRESS[:PORT] on each node; under srun they are known",
        )
    if wrong := wrong_endpoint(place["--master"]):
        raise UsageError(f"--master: {wrong}", next_step="give --master ADDRESS or ADDRESS:PORT")

    address, port = split_endpoint(place["--master"])
    return nodes.NodeOptions(
        node=place["--node-rank"],
        nodes=place["--nodes"],
        master=address,
        port=int(port),
        secret=secret_from(environment),
        wait_s=float(verb_flags.get("wait", WAIT_S)),
    )


def _check_this_machine(verb_flags: FlagValues, task: TaskCheck | None = None) -> int:
    """With the parameters of a task, and with real collectives, where they were asked for."""
    options = _options(verb_flags)
    facts = host_facts(options.settings)
    findings = list(machine_findings(facts))
    if task is not None:
        findings += task.findings

    numbers: Mapping[str, float] | None = None
    if verb_flags.collectives:
        collective_findings, numbers = local_collectives(
            options.procs,
            environment=options.settings.environment,
            num_gpus=num_visible_gpus(facts),
            backend=options.backend,
        )
        findings += collective_findings

    if verb_flags.json:
        document = None if task is None else task.document
        all_facts = {socket.gethostname(): facts}
        show(as_json(findings, facts=all_facts, collectives=numbers, task=document))
    else:
        rows = machine_rows(facts)
        if task is not None:
            rows.append(("parameters", task.row))
        if numbers is not None:
            rows.append(("collectives", numbers_text(numbers) or "no result"))
        _report(findings, [f"{label:<{LABEL_WIDTH}}  {value}" for label, value in rows])

    return ExitCode.PREFLIGHT_FAILED if has_problems(findings) else ExitCode.SUCCESS


def _options(verb_flags: FlagValues) -> DoctorOptions:
    """What is checked, from the flags and the environment."""
    here = Path.cwd()
    code = verb_flags.code
    # A home folder differs on every host, and is not a run's code.
    if not code and here not in (Path.home(), Path("/")):
        code = "."

    data = verb_flags.data or os.environ.get("DATASET_DIR")
    settings = HostSettings(
        environment=dict(os.environ),
        run_folder=str(Path(verb_flags.get("run", ".")).absolute()),
        code=str(Path(code).absolute()) if code else None,
        data=str(Path(data).absolute()) if data else None,
    )
    return DoctorOptions(
        settings,
        verb_flags.get("collectives", True),
        verb_flags.procs,
        verb_flags.get("backend", "auto"),
    )


def _show(verb_flags: FlagValues, result: DoctorResult) -> int:
    """Print what the hosts and their pairs gave."""
    show_step("")
    survey = result.survey
    if verb_flags.json:
        collectives = result.collectives
        show(as_json(result.findings, survey=survey, facts=survey.facts, collectives=collectives))
    else:
        notes = [] if result.collectives is None else [collectives_line(result.collectives)]
        _report(result.findings, notes, survey)
    return result.exit_code


def _report(findings: Sequence[Finding], notes: list[str], survey: Survey | None = None) -> None:
    """The findings as text, as wide as the terminal."""
    report(
        findings,
        survey=survey,
        notes=notes,
        is_terminal=sys.stdout.isatty(),
    )


def show_step(text: str) -> None:
    """On stderr: on a terminal one line that is updated, otherwise a line for each step; "" ends
    it."""
    if sys.stderr.isatty():
        show_progress(text)
    elif text:
        print_message(text)
