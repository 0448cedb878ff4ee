"""`drumline launch --slurm` writes a batch file and submits it, `--srun` is one node of such a job,
and `--kubernetes` and `--print skypilot|parallelcluster` write a file."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from drumline.base.errors import ExitCode, PreflightError, UsageError
from drumline.base.terminal import print_message, show
from drumline.cli.cloud_file import cloud_file_text
from drumline.cli.launch_flags import OF_SBATCH
from drumline.cli.launch_request import LaunchRequest, is_script
from drumline.launch.hosts import least_nodes
from drumline.launch.kubernetes import KubernetesJob, manifest_text, wrong_object_name
from drumline.launch.slurm import (
    MAX_REQUEUES,
    SIGNAL_BEFORE_S,
    BatchJob,
    batch_text,
    check_sbatch,
    node_of_step,
    submit,
    write_batch_file,
)

# Flags that the launcher of each node gets as they are.
_PASSED_ON = (
    *("procs", "max-restarts", "grace", "nnodes", "join-timeout", "last-call", "lost-after"),
    *("watch", "on-hang", "hang-after"),
)
_SUBMITTED = """\
submitted {path} as job {job}
log      {log}
follow   squeue --job {job}; tail -F {log}
pause    scancel --signal=USR1 {job}    (it saves, and is requeued)
cancel   scancel {job}
"""


def submit_to_slurm(request: LaunchRequest) -> int:
    """Write the batch file and submit it with sbatch; with --print only show it."""
    verb_flags = request.flags
    # Mistakes are reported now, not after hours in a queue.
    request.program()
    least_nodes(verb_flags.get("nnodes"), verb_flags.get("nodes", 1), known_from="--nodes")
    name = verb_flags.get("job-name") or request.name
    command = [sys.executable, "-m", "drumline", "launch", "--srun", *_passed_on(request), "--"]
    job = BatchJob(
        name=name,
        command=[*command, request.target, *request.arguments],
        num_nodes=verb_flags.get("nodes", 1),
        num_gpus=verb_flags.get("gpus"),
        num_cpus=verb_flags.get("cpus"),
        options={name: verb_flags[name] for name in OF_SBATCH if name in verb_flags},
        further_flags=shlex.split(verb_flags.get("sbatch", "")),
        signal_before_s=verb_flags.get("signal-before", SIGNAL_BEFORE_S),
        max_requeues=verb_flags.get("max-requeues", MAX_REQUEUES),
        may_shrink="nnodes" in verb_flags,
    )
    text = batch_text(job)
    if verb_flags.get("print"):
        show(text, end="", is_data=True)
        return ExitCode.SUCCESS
    sbatch = check_sbatch(os.environ.get("PATH"))
    path = Path(verb_flags.get("out") or f"{name}.sbatch")
    write_batch_file(path, text)
    number = submit(sbatch, path)
    log = job.log.replace("%j", number)
    print_message(
        *(line.format(path=path, job=number, log=log) for line in _SUBMITTED.splitlines())
    )
    return ExitCode.SUCCESS


def _passed_on(request: LaunchRequest) -> list[str]:
    return [f"--{name}={request.flags[name]}" for name in _PASSED_ON if name in request.flags]


def run_as_node(request: LaunchRequest) -> int:
    """This process is the task of one node of an srun step."""
    verb_flags = request.flags
    if not is_script(request.target) and int(os.environ.get("SLURM_RESTART_COUNT", "0")) > 0:
        # The command is the same after a requeue, where --fresh must not start over.
        request = replace(
            request, arguments=[word for word in request.arguments if word != "--fresh"]
        )
    program = request.program()
    node = node_of_step(os.environ, num_procs=verb_flags.get("procs"))
    least = least_nodes(verb_flags.get("nnodes"), node.num_nodes, known_from="the step")
    return request.run_node(request.completed(node, least), program)


def write_manifest(request: LaunchRequest) -> int:
    """A Kubernetes manifest: to the screen, to a file, or with --apply to the cluster."""
    verb_flags = request.flags
    name = verb_flags.get("name") or request.name
    if wrong := wrong_object_name(
        f"no --name, and the job would be named after {request.target}", name
    ):
        raise UsageError(wrong, next_step="give it a --name")
    claim = verb_flags.get("claim")
    procs = verb_flags.get("procs", 1)
    least = least_nodes(verb_flags.get("nnodes"), verb_flags.get("nodes", 1), known_from="--nodes")
    manifest = KubernetesJob(
        name=name,
        image=verb_flags["image"],
        program=request.program(("--run", f"/runs/{name}" if claim else None)),
        namespace=verb_flags.get("namespace"),
        num_nodes=verb_flags.get("nodes", 1),
        num_procs=procs,
        num_gpus=verb_flags.get("gpus", procs),
        claim=claim,
        max_restarts=request.restarts(least),
        min_nodes=least,
    )
    text = manifest_text(manifest, verb_flags.get("api", "v2"))
    out = verb_flags.get("out")
    if not verb_flags.get("apply"):
        _write(text, out, f"apply it with: kubectl apply -f {shlex.quote(out or '')}")
        return ExitCode.SUCCESS
    if out:
        _write(text, out, "")
    return _apply(text)


def write_cloud_file(request: LaunchRequest) -> int:
    """A file for SkyPilot or AWS ParallelCluster: to the screen, or to a file."""
    _write(
        cloud_file_text(request, _passed_on(request)),
        request.flags.get("out"),
        "its first lines show how to start it",
    )
    return ExitCode.SUCCESS


def _write(text: str, out: str | None, next_step: str) -> None:
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


def _apply(text: str) -> int:
    """With kubectl, in the user's own context; its output is shown as it is."""
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        raise UsageError(
            "--apply needs kubectl, which is not installed here",
            next_step="install kubectl, or write the manifest with --out and apply it elsewhere",
        )
    done = subprocess.run([kubectl, "apply", "-f", "-"], input=text, encoding="utf-8", check=False)
    if done.returncode:
        raise PreflightError(
            f"kubectl refused the manifest (exit code {done.returncode}); its output is above",
            next_step="inspect the manifest with --out FILE; `kubectl config current-context` names the cluster",
        )
    return ExitCode.SUCCESS
