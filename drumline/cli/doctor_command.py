"""`drumline doctor`: is this machine, and every pair of hosts, fit for the job? Said before a GPU second is spent."""

from __future__ import annotations

import os
import shutil
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from drumline.config import Flags, read_flags
from drumline.config.schema import Bounds, Count, CountOrZero
from drumline.errors import ConfigError, ExitCode, UsageError
from drumline.launch.hosts import Host, hosts_from_file, hosts_from_flag, wrong_name
from drumline.launch.node_plan import DEFAULT_PORT
from drumline.terminal import print_message, show, show_lines, show_progress

if TYPE_CHECKING:
    from drumline.doctor.many_hosts import Result, Wishes
    from drumline.doctor.pairs.joining import Place
    from drumline.doctor.pairs.node import Subject

WAIT_S = 10
LABEL_WIDTH = len("CUDA_VISIBLE_DEVICES")
FlagTable = Mapping[str, tuple[Any, str, str]]
# As the help shows them.
GROUPS: Mapping[str, FlagTable] = {
    "anywhere": {
        "data": (str, "DIR", "The dataset's folder, to be compared between hosts [DATASET_DIR]."),
        "code": (
            str,
            "DIR",
            "The code's folder, to be compared between hosts [this folder, if it is not the home].",
        ),
        "run": (str, "DIR", "Where runs will be written: its disk is looked at [this folder]."),
        "json": (bool, "", "For scripts: everything that was learned."),
        "help": (bool, "", "Show this text."),
    },
    "over ssh": {
        "hosts": (str, "A,B:4,C", "Examine these hosts and every pair of them."),
        "hostfile": (str, "FILE", "The same, with the hosts in a file: `host` or `host slots=N` on a line."),
        "port": (
            Annotated[int, Bounds(low=1, high=65535)],
            "N",
            f"The rendezvous port, which all must reach on the first host [{DEFAULT_PORT}].",
        ),
        "ssh": (str, "COMMAND", "How ssh is called, as in 'ssh -F file' [DRUMLINE_SSH, or ssh]."),
        "python": (str, "PATH", "Python on the hosts [the one that runs this]."),
    },
    "without ssh  The same command on each node: typed, by srun, or in pods.": {
        "nodes": (Count, "N", "How many nodes there are [SLURM_NNODES]."),
        "node-rank": (CountOrZero, "K", "Which of them this is; node 0 leads and reports [SLURM_NODEID]."),
        "master": (
            str,
            "ADDR[:PORT]",
            f"Where node 0 is [the first host of the srun step; port {DEFAULT_PORT}].",
        ),
        "wait": (Count, "S", f"How many seconds nodes wait for each other [{WAIT_S}]."),
    },
    "a real process group  Values of collectives, and a step of DDP.": {
        "collectives": (
            bool,
            "",
            "Try it at the end [on for several hosts, off for this machine alone]; --no-collectives leaves it out.",
        ),
        "procs": (Count, "N", "Ranks of each host [one per GPU, or 1]."),
        "backend": (Literal["auto", "gloo", "nccl"], "auto | gloo | nccl", "[nccl on GPUs, else gloo]"),
    },
}
OWN_FLAGS: FlagTable = {name: flag for table in GROUPS.values() for name, flag in table.items()}
OF_SSH = ("ssh", "python", "port")
OF_NODES = ("nodes", "node-rank", "master", "wait")
USAGE = """\
usage: drumline doctor [flags]

Is this machine, or every pair of hosts, fit for the job? Nothing is changed.

  drumline doctor                              this machine, in seconds
  drumline doctor --hosts a,b,c                hosts, and every pair of them
  drumline doctor --nodes 2 --node-rank 0 --master a      without ssh, on each
  srun --ntasks-per-node 1 drumline doctor --nodes 2      the same, by Slurm

Of every pair: names, the rendezvous port, data ports in both directions,
interfaces, large messages, latency, bandwidth, clocks. Then what differs
between hosts. Then, when all of that is well, a real process group.
"""
EXIT_CODES = """\
DRUMLINE_SECRET, set to one value of 16 characters or more on all nodes, keeps
strangers out of an examination without ssh.

exit codes: 0 fit to train, 2 wrong usage, 3 something must be fixed,
            130 interrupted
"""


def run(argv: Sequence[str]) -> int:
    """The verb."""
    flags = read_flags(argv, OWN_FLAGS, no_settings="is a setting of a run; the doctor takes none")
    given = flags.own
    if given.get("help"):
        show(_help(), end="")
        return ExitCode.SUCCESS
    if problems := list(_wrong_flags(flags)):
        raise ConfigError(problems, next_step="`drumline doctor --help` says what it takes")
    if "hosts" in given or "hostfile" in given:
        return _examine_hosts(given)
    if any(name in given for name in OF_NODES):
        return _examine_by_hand(given)
    return _examine_this_machine(given)


def _wrong_flags(flags: Flags) -> Iterator[str]:
    yield from flags.layer.problems
    given = flags.own
    wheres = [name for name in ("hosts", "hostfile") if name in given]
    by_hand = [name for name in OF_NODES if name in given]
    if len(wheres) > 1:
        yield "--hosts and --hostfile exclude each other: each lists the hosts"
    if wheres and by_hand:
        yield f"--{wheres[0]} goes by ssh, and --{by_hand[0]} without it: give one of them"
    if not wheres:
        yield from (f"--{name}: belongs to --hosts and --hostfile" for name in OF_SSH if name in given)
    if not given.get("collectives", bool(wheres or by_hand)):
        yield from (f"--{name}: belongs to --collectives" for name in ("procs", "backend") if name in given)


# Over ssh


def _examine_hosts(given: Mapping[str, Any]) -> int:
    import asyncio

    from drumline.doctor.many_hosts import over_ssh
    from drumline.launch.ssh.client import ssh_client

    hosts = _hosts(given)
    client, progress = ssh_client(given.get("ssh"), os.environ), _progress()
    result = asyncio.run(
        over_ssh(
            hosts,
            _wishes(given),
            port=given.get("port", DEFAULT_PORT),
            client=client,
            python=given.get("python", sys.executable),
            progress=progress,
        )
    )
    progress("")
    return _show(given, result)


def _hosts(given: Mapping[str, Any]) -> list[Host]:
    if "hosts" in given:
        return hosts_from_flag(given["hosts"])
    return hosts_from_file(Path(given["hostfile"]))


# By hand


def _examine_by_hand(given: Mapping[str, Any]) -> int:
    from drumline.doctor.pairs.joining import join

    place = _place(given, os.environ)
    wishes = _wishes(given)
    if place.node > 0:
        progress = _progress()
        progress(f"node {place.node} of {place.nodes} goes to {place.master}:{place.port}")
        last = join(place, wishes.subject)
        progress("")
        # Of all nodes together, as srun gathers them, stdout has the report alone when it is for a script.
        show_lines(
            [f"node {place.node}: {last.get('verdict', '')} (node 0 has the report)"],
            stream=sys.stderr if given.get("json") else sys.stdout,
        )
        return int(last.get("code", ExitCode.PREFLIGHT_FAILED))

    import asyncio

    from drumline.doctor.many_hosts import by_hand

    progress = _progress()
    result = asyncio.run(by_hand(place, wishes, progress))
    progress("")
    return _show(given, result)


def _place(given: Mapping[str, Any], environment: Mapping[str, str]) -> Place:
    from drumline.doctor.pairs.joining import Place, check_place
    from drumline.launch.slurm import first_host
    from drumline.net.secrets import secret_from

    nodes, node = given.get("nodes"), given.get("node-rank")
    nodes = _number(environment, "SLURM_NNODES") if nodes is None else nodes
    node = _number(environment, "SLURM_NODEID") if node is None else node
    master = given.get("master")
    if master is None and (listed := environment.get("SLURM_STEP_NODELIST")):
        master = first_host(listed)
    known = {"--nodes": nodes, "--node-rank": node, "--master": master}
    if missing := [name for name, value in known.items() if value is None]:
        raise UsageError(
            f"{' and '.join(missing)} {'are' if len(missing) > 1 else 'is'} missing",
            next_step="give --nodes N --node-rank K --master ADDRESS[:PORT] on each node; srun gives them by itself",
        )
    assert nodes is not None
    assert node is not None
    assert master is not None
    check_place(node, nodes)
    address, port = _endpoint(master)
    return Place(node, nodes, address, port, secret_from(environment), float(given.get("wait", WAIT_S)))


def _number(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name, "")
    return int(text) if text.isdecimal() else None


def _endpoint(master: str) -> tuple[str, int]:
    address, colon, port = master.partition(":")
    if wrong := wrong_name(address):
        raise UsageError(f"--master: {wrong}", next_step="give --master ADDRESS or ADDRESS:PORT")
    if colon and not (port.isdecimal() and 0 < int(port) < 65536):
        raise UsageError(
            f"--master {master}: {port!r} is no port",
            next_step="give a number from 1 to 65535 behind the colon",
        )
    return address, int(port) if colon else DEFAULT_PORT


# This machine


def _examine_this_machine(given: Mapping[str, Any]) -> int:
    from drumline.doctor.collectives.run_collectives import local_collectives, numbers_text
    from drumline.doctor.finding import has_problems
    from drumline.doctor.machine.gpu_checks import num_visible_gpus
    from drumline.doctor.machine.machine_checks import machine_findings
    from drumline.doctor.machine.machine_facts import machine_facts
    from drumline.doctor.machine.summary import machine_rows
    from drumline.doctor.report import as_json, report

    subject = _subject(given)
    facts = machine_facts(
        subject.environment,
        run_folder=Path(subject.run_folder),
        code=None if subject.code is None else Path(subject.code),
        data=None if subject.data is None else Path(subject.data),
    )
    findings = machine_findings(facts)
    numbers: Mapping[str, float] | None = None
    if given.get("collectives"):
        found, numbers = local_collectives(
            given.get("procs"),
            environment=subject.environment,
            num_gpus=num_visible_gpus(facts),
            backend=given.get("backend", "auto"),
        )
        findings += found
    if given.get("json"):
        show(as_json(findings, facts={socket.gethostname(): facts}, collectives=numbers))
    else:
        rows = machine_rows(facts)
        if numbers is not None:
            rows.append(("collectives", numbers_text(numbers) or "no result"))
        notes = [f"{label:<{LABEL_WIDTH}}  {value}" for label, value in rows]
        report(
            findings, notes=notes, is_terminal=sys.stdout.isatty(), width=shutil.get_terminal_size().columns
        )
    return ExitCode.PREFLIGHT_FAILED if has_problems(findings) else ExitCode.SUCCESS


# What all share


def _wishes(given: Mapping[str, Any]) -> Wishes:
    from drumline.doctor.many_hosts import Wishes

    return Wishes(
        _subject(given), given.get("collectives", True), given.get("procs"), given.get("backend", "auto")
    )


def _subject(given: Mapping[str, Any]) -> Subject:
    from drumline.doctor.pairs.node import Subject

    here = Path.cwd()
    data = given.get("data") or os.environ.get("DATASET_DIR")
    # A home folder is different on every host, and no code of a run.
    code = given.get("code") or (None if here in (Path.home(), Path("/")) else ".")
    return Subject(
        environment=dict(os.environ),
        run_folder=str(Path(given.get("run", ".")).absolute()),
        code=None if code is None else str(Path(code).absolute()),
        data=None if not data else str(Path(data).absolute()),
    )


def _show(given: Mapping[str, Any], result: Result) -> int:
    from drumline.doctor.collectives.run_collectives import collectives_line
    from drumline.doctor.report import as_json, report

    if given.get("json"):
        known = {host.name: host.facts for host in result.survey.hosts if host.facts is not None}
        rows = [row.as_json() for row in result.table]
        show(
            as_json(
                result.findings, survey=result.survey, facts=known, table=rows, collectives=result.collectives
            )
        )
    else:
        report(
            result.findings,
            survey=result.survey,
            table=result.table,
            notes=[] if result.collectives is None else [collectives_line(result.collectives)],
            is_terminal=sys.stdout.isatty(),
            width=shutil.get_terminal_size().columns,
        )
    return result.exit_code


def _progress() -> Any:
    """On stderr: one line that changes on a terminal, else a line for each thing."""
    if sys.stderr.isatty():
        return show_progress
    return lambda text: print_message(text) if text else None


def _help() -> str:
    from drumline.config.help import render_flags

    return "\n".join([USAGE, render_flags(GROUPS, width=shutil.get_terminal_size().columns), EXIT_CODES])
