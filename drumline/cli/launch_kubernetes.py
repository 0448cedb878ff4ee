"""`drumline launch --kubernetes`: writes a manifest, and applies it only when asked to."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from drumline.cli import train_command
from drumline.cli.launch_program import is_script, program_of, restarts_of
from drumline.config import Flags
from drumline.errors import ExitCode, PreflightError, UsageError
from drumline.launch.hosts import least_nodes
from drumline.launch.kubernetes import KubernetesJob, manifest_text, wrong_object_name
from drumline.terminal import print_message, show


def write_manifest(flags: Flags, target: str, arguments: Sequence[str]) -> int:
    """To the screen, a file or the cluster."""
    given = flags.own
    name = given.get("name") or default_name(target)
    if wrong := wrong_object_name(f"no --name, and the job would be named after {target}", name):
        raise UsageError(wrong, next_step="give it a --name")
    claim, procs = given.get("claim"), given.get("procs", 1)
    least = least_nodes(given.get("nnodes"), given.get("nodes", 1), known_from="--nodes")
    run_folder = ("--run", f"/runs/{name}" if claim else None)
    manifest = KubernetesJob(
        name=name,
        image=given["image"],
        program=program_of(target, arguments, run_folder),
        namespace=given.get("namespace"),
        num_nodes=given.get("nodes", 1),
        num_procs=procs,
        num_gpus=given.get("gpus", procs),
        claim=claim,
        max_restarts=restarts_of(flags, target, least),
        min_nodes=least,
    )
    text = manifest_text(manifest, given.get("api", "v2"))
    if out := given.get("out"):
        _write(out, text)
    if given.get("apply"):
        return _apply(text)
    if out:
        print_message(f"wrote {out}; apply it with: kubectl apply -f {shlex.quote(out)}")
    else:
        show(text, end="", is_data=True)
    return ExitCode.SUCCESS


def _write(out: str, text: str) -> None:
    try:
        Path(out).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{out} cannot be written: {error.strerror}", next_step="check --out") from error


def _apply(text: str) -> int:
    """By kubectl, with the user's own context; what it says is shown as it is."""
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        raise UsageError(
            "--apply needs kubectl, which is not installed here",
            next_step="install kubectl, or write the manifest with --out and apply it elsewhere",
        )
    done = subprocess.run([kubectl, "apply", "-f", "-"], input=text, encoding="utf-8", check=False)
    if done.returncode:
        raise PreflightError(
            f"kubectl did not take the manifest (exit code {done.returncode}); what it said is above",
            next_step="look at it with --out FILE; `kubectl config current-context` names the cluster",
        )
    return ExitCode.SUCCESS


def default_name(target: str) -> str:
    """`examples/own_loop.py` becomes `own-loop`, `tasks.py:MyTask` becomes `mytask`."""
    base = Path(target).stem if is_script(target) else train_command.run_name(target)
    return re.sub(r"[^a-z0-9]+", "-", base.lower()).strip("-")
