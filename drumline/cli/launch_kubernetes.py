"""`drumline launch --kubernetes`: writes a manifest, and applies nothing."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from drumline.cli import train
from drumline.cli.launch_program import is_script, program_of, restarts_of
from drumline.config import Flags
from drumline.errors import ExitCode, UsageError
from drumline.launch.kubernetes import Manifest, manifest_text, wrong_name


def write_manifest(flags: Flags, target: str, arguments: Sequence[str]) -> int:
    """To the screen or a file."""
    given = flags.own
    name = given.get("name") or default_name(target)
    if wrong := wrong_name(f"no --name, and the job would be named after {target}", name):
        raise UsageError(wrong, next_step="give it a --name")
    claim, procs = given.get("claim"), given.get("procs", 1)
    run_folder = ("--run", f"/runs/{name}" if claim else None)
    manifest = Manifest(
        name=name,
        image=given["image"],
        program=program_of(target, arguments, run_folder),
        namespace=given.get("namespace"),
        num_nodes=given.get("nodes", 1),
        num_procs=procs,
        num_gpus=given.get("gpus", procs),
        claim=claim,
        max_restarts=restarts_of(flags, target),
    )
    text = manifest_text(manifest, given.get("api", "v2"))
    if out := given.get("out"):
        try:
            Path(out).write_text(text)
        except OSError as error:
            raise UsageError(f"{out} cannot be written: {error.strerror}", next_step="check --out") from error
        print(f"drumline: wrote {out}; apply it with: kubectl apply -f {shlex.quote(out)}", file=sys.stderr)
    else:
        print(text, end="")
    return ExitCode.SUCCESS


def default_name(target: str) -> str:
    """`examples/own_loop.py` becomes `own-loop`, `tasks.py:MyTask` becomes `mytask`."""
    base = Path(target).stem if is_script(target) else train.run_name(target)
    return re.sub(r"[^a-z0-9]+", "-", base.lower()).strip("-")
