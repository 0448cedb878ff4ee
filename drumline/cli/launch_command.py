"""`drumline launch [where] TASK|SCRIPT.py [args]`: starts a job's ranks here or on other hosts,
submits it to Slurm or Kubernetes, or writes a file for another launcher."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from drumline.base.errors import ConfigError, ExitCode, UsageError
from drumline.base.json_output import wrap_output
from drumline.base.startup import default_procs
from drumline.base.text import plural, print_message, show
from drumline.cli.cloud_file import cloud_file_text
from drumline.cli.command_line import check_command, check_no_rank, show_help
from drumline.cli.kubernetes_file import apply, kubernetes_text
from drumline.cli.launch_flags import GROUPS, OWN_FLAGS, wrong_flags, wrong_target
from drumline.cli.launch_request import LaunchRequest, is_script, launch_folder
from drumline.config import read_flags
from drumline.launch.detached.commands import launch_detached
from drumline.launch.env_file import EnvFile, read_env_file
from drumline.launch.hosts import least_nodes, listed_hosts, spares_from_flag, with_addresses
from drumline.launch.node.guard import DEFAULT_GRACE_S, new_job
from drumline.launch.node_plan import (
    DEFAULT_PORT,
    NodePlan,
    Program,
    nodes_of_hosts,
    split_endpoint,
    torchrun_command,
)
from drumline.launch.slurm import (
    batch_text,
    check_sbatch,
    log_name,
    node_of_step,
    sets_cores,
    submit,
    write_batch_file,
)
from drumline.launch.ssh.client import ssh_client
from drumline.launch.ssh.hosts_job import HostsJob, variables_for_ranks, wrong_variables
from drumline.launch.ssh.hosts_launcher import run_on_hosts
from drumline.launch.ssh.sync import copy_code
from drumline.runs.run_folder import run_name

USAGE = """\
usage: drumline launch [where] [flags] TASK|SCRIPT.py [arguments]

Starts a task, or any script that torchrun could start, with torchrun's own
agent. Flags of the launch come before the name, arguments of the task or script
after it.

  drumline launch --procs 8 train.py --epochs 3       8 ranks on this machine
  drumline launch --hosts a,b:4 --procs 8 digits      8 on a, 4 on b, over ssh
  drumline launch --watch --procs 8 train.py          hangs are reported by rank
  drumline launch --keep-going --hosts a,b digits     resumes after a preemption
                                                      and a full disk by itself
  drumline launch --detach --hosts a,b digits         it runs on without this
                                                      machine
  drumline launch --env-file .env digits              this node of a job
  drumline launch --slurm --nodes 2 --time 8:00:00 digits
  drumline launch --kubernetes --nodes 2 --image me/train:1 digits
  drumline launch --print --hosts a,b digits          only show the commands
  drumline launch --print skypilot --accelerators L4:4 digits

Test the hosts first: drumline doctor --hosts a,b
"""
EXIT_CODES = """\
exit codes: 0 success, 2 wrong usage, 3 a host is unreachable or the rendezvous
            failed, 70 the run hangs and was stopped, 75 preempted by a signal,
            and saved, 130 interrupted; otherwise that of the rank that failed
            first (1 when a signal ended it, or its host was lost)
"""
# How long the nodes of a detached job wait for each other: one may be rebooting.
REBOOT_S = 1800
SETTINGS_COME_LATER = "a setting of the task goes after its name"
# Flags that the launcher of each node gets as they are.
_PASSED_ON = (
    *("procs", "max-restarts", "grace", "nnodes", "join-timeout", "last-call", "lost-after"),
    *("watch", "on-hang", "hang-after", "prometheus"),
)


def run(argv: Sequence[str], follow: Sequence[str] = ()) -> int:
    """All mistakes in the command are reported before torch is imported. `follow`: of the
    request."""
    flags = read_flags(argv, OWN_FLAGS, ends_at_name=True, no_settings=SETTINGS_COME_LATER)
    show_help(flags, GROUPS, USAGE, EXIT_CODES)
    check_command("launch", [*wrong_flags(flags), *wrong_target(flags)])
    target, *arguments = flags.positional
    request = LaunchRequest(flags.values, target, arguments, follow)
    if isinstance(flags.values.print, str):
        return _write_cloud_file(request)
    if flags.values.kubernetes:
        return _write_manifest(request)
    if flags.values.slurm:
        return _submit_to_slurm(request)
    if flags.values.srun:
        return _run_as_node(request)
    if "hosts" in flags.values or "hostfile" in flags.values:
        return _launch_on_hosts(request)
    return _launch_here(request)


def _with_profile(request: LaunchRequest, code: int) -> int:
    """After the ranks have ended: show the profile of a script, unless the caller does."""
    if request.profile and code == ExitCode.SUCCESS and not request.flags.profile_only:
        from drumline.cli.profile_report import report_profile

        report_profile(Path(request.profile[1]))
    return code


def _launch_here(request: LaunchRequest) -> int:
    """Launch the whole job, or one node of it, described by an --env-file or by flags."""
    verb_flags = request.flags
    file = read_env_file(Path(verb_flags.env_file)) if "env-file" in verb_flags else None
    node = _node(request, file)
    program = request.program(*(file.task_defaults(run_name(request.target)) if file else ()))
    if verb_flags.print:
        _print_nodes(node, program, file.other_names if file else [])
        return ExitCode.SUCCESS
    wrap_output()
    # A Kubernetes operator sets RANK in every pod; --node-rank overrides that.
    if "node-rank" not in verb_flags:
        check_no_rank("launch")
    if file is not None:
        os.environ.update(file.variables)

    return _with_profile(request, request.run_node(node, program))


def _node(request: LaunchRequest, file: EnvFile | None) -> NodePlan:
    """This node, from the file or the flags; without either it is the whole job."""
    verb_flags = request.flags
    num_nodes = verb_flags.get("nodes", 1)
    node_rank = verb_flags.node_rank
    if file is not None:
        node = file.node
    elif node_rank is None or num_nodes == 1:
        return request.completed(NodePlan(num_procs=verb_flags.procs), None)
    else:
        node = NodePlan(
            num_nodes=num_nodes,
            node_rank=node_rank,
            num_procs=verb_flags.procs,
            endpoint=":".join(split_endpoint(verb_flags.master)),
        )

    known_from = verb_flags.get("env-file", "--nodes")
    least = least_nodes(verb_flags.nnodes, node.num_nodes, known_from=known_from)
    node = replace(node, address=verb_flags.address)
    return request.completed(node, least or node.min_nodes)


def _print_nodes(node: NodePlan, program: Program, variables: Sequence[str]) -> None:
    """Show the torchrun line of each node; the other nodes' numbers of ranks are not known here."""
    if variables:
        show(f"# with these in the environment: {', '.join(variables)}")
    if node.num_procs is None:
        node = replace(node, num_procs=default_procs())
    if node.num_nodes == 1:
        show(shlex.join(torchrun_command(node, program)), is_data=True)
        return
    show("# plain torchrun numbers nodes by their addresses; give each its own number of ranks")
    for rank in range(node.num_nodes):
        planned = node if rank == node.node_rank else replace(node, node_rank=rank, address=None)
        show(f"# node {rank} of {node.num_nodes}{', this one' if planned is node else ''}")
        show(shlex.join(torchrun_command(planned, program)), is_data=True)


def _launch_on_hosts(request: LaunchRequest) -> int:
    """Start the job over ssh and wait for it; with --print show the line to run on each host."""
    verb_flags = request.flags
    hosts = listed_hosts(verb_flags.hosts, verb_flags.hostfile)
    if "addresses" in verb_flags:
        hosts = with_addresses(hosts, verb_flags.addresses)
    spares = spares_from_flag(verb_flags.spare, hosts) if "spare" in verb_flags else []
    program = request.program()
    least = least_nodes(verb_flags.nnodes, len(hosts), known_from="the list of hosts")
    node = request.completed(NodePlan(num_procs=verb_flags.procs, job=new_job()), least)
    nodes = nodes_of_hosts(hosts, verb_flags.get("port", DEFAULT_PORT), [node] * len(hosts))
    if verb_flags.print:
        for host, planned in zip(hosts, nodes, strict=True):
            show(f"# {host.name}")
            show(shlex.join(torchrun_command(planned, program)), is_data=True)
        return ExitCode.SUCCESS
    if problems := list(wrong_variables(verb_flags.get("env", []), os.environ)):
        raise ConfigError(problems)

    wrap_output()
    if verb_flags.detach and "join-timeout" not in verb_flags:
        nodes = [replace(planned, join_timeout_s=REBOOT_S) for planned in nodes]

    logs = Path(verb_flags.logs or launch_folder(node.job))
    job = HostsJob(
        job=node.job,
        hosts=hosts,
        nodes=nodes,
        program=program,
        client=ssh_client(verb_flags.ssh, os.environ),
        python=verb_flags.get("python", sys.executable),
        python_path=os.environ.get("PYTHONPATH"),
        cwd=Path.cwd(),
        logs=logs,
        environment=variables_for_ranks(verb_flags.get("env", []), os.environ),
        grace_s=verb_flags.get("grace", DEFAULT_GRACE_S),
        min_nodes=least,
        script_watch=request.script_watch(logs),
        spares=spares,
        standby=verb_flags.get("standby", True),
        keep_going=verb_flags.get("keep-going", bool(verb_flags.detach)),
    )
    if verb_flags.sync:
        all_hosts = [*hosts, *spares]
        print_message(
            f"copying {job.cwd} to {plural(len(all_hosts), 'host')} with rsync", stream=sys.stdout
        )
        copy_code(job.cwd, job.client, all_hosts, verb_flags.get("exclude", []))
        print_message("the code is the same on all hosts", stream=sys.stdout)

    if verb_flags.detach:
        return launch_detached(job, request.name, request.follow_words)
    return _with_profile(request, run_on_hosts(job))


# On a cluster


def _submit_to_slurm(request: LaunchRequest) -> int:
    """Write the batch file and submit it with sbatch; with --print only show it."""
    verb_flags = request.flags
    # Mistakes are reported now, not after hours in a queue.
    request.program()
    least_nodes(verb_flags.nnodes, verb_flags.get("nodes", 1), known_from="--nodes")
    name = verb_flags.job_name or request.name
    python = verb_flags.python or ("python3" if verb_flags.container else sys.executable)
    num_cpus = verb_flags.cpus
    num_ranks = verb_flags.procs or verb_flags.gpus
    if num_cpus is None and num_ranks and not sets_cores(verb_flags.sbatch):
        num_cpus = num_ranks
        print_message(
            f"note: {plural(num_cpus, 'core')} for each node, one for each rank; "
            "--cpus N gives more to workers that load data"
        )
    command = [python, "-m", "drumline", "launch", "--srun", *_passed_on(request), "--"]
    command += [request.target, *request.arguments]
    text = batch_text(name, command, verb_flags, num_cpus=num_cpus)
    if verb_flags.print:
        show(text, end="", is_data=True)
        return ExitCode.SUCCESS

    sbatch = check_sbatch(os.environ.get("PATH"))
    path = Path(verb_flags.out or f"{name}.sbatch")
    write_batch_file(path, text)
    number = submit(sbatch, path)
    log = log_name(name).replace("%j", number)
    print_message(
        f"submitted {path} as job {number}",
        f"log      {log}",
        f"follow   squeue --job {number}; tail -F {log}",
        f"pause    scancel --signal=USR1 {number}    (it saves, and is requeued)",
        f"cancel   scancel {number}",
    )
    return ExitCode.SUCCESS


def _passed_on(request: LaunchRequest) -> list[str]:
    return [f"--{name}={request.flags[name]}" for name in _PASSED_ON if name in request.flags]


def _run_as_node(request: LaunchRequest) -> int:
    """This process is the task of one node of an srun step."""
    verb_flags = request.flags
    if not is_script(request.target) and int(os.environ.get("SLURM_RESTART_COUNT", "0")) > 0:
        # The command is the same after a requeue, where --fresh must not start over.
        request = replace(
            request, arguments=[word for word in request.arguments if word != "--fresh"]
        )
    program = request.program()
    wrap_output()
    node = node_of_step(os.environ, num_procs=verb_flags.procs)
    least = least_nodes(verb_flags.nnodes, node.num_nodes, known_from="the step")
    return request.run_node(request.completed(node, least), program)


def _write_manifest(request: LaunchRequest) -> int:
    """A Kubernetes manifest: to the screen, to a file, or with --apply to the cluster."""
    job, text = kubernetes_text(request)
    out = request.flags.out
    if not request.flags.apply:
        _write(text, out, f"apply it with: kubectl apply -f {shlex.quote(out or '')}")
        return ExitCode.SUCCESS
    if out:
        _write(text, out, "")

    apply(job, text)
    return ExitCode.SUCCESS


def _write_cloud_file(request: LaunchRequest) -> int:
    """A file for SkyPilot or AWS ParallelCluster: to the screen, or to a file."""
    _write(
        cloud_file_text(request, _passed_on(request)),
        request.flags.out,
        "its first lines show how to start it",
    )
    return ExitCode.SUCCESS


def _write(text: str, out: str | None, next_step: str) -> None:
    """To the screen, or to the file of --out."""
    if out is None:
        show(text, end="", is_data=True)
        return
    try:
        Path(out).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"{out} cannot be written: {error.strerror}", next_step="check --out"
        ) from error
    if next_step:
        print_message(f"wrote {out}; {next_step}")
