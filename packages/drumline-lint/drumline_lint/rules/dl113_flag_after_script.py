"""DL113: a flag for the launcher that is given to the training script."""

from __future__ import annotations

from collections.abc import Iterator

from drumline_lint.findings import Finding, Severity, rule
from drumline_lint.reading.launchers import ACCELERATE, DEEPSPEED, OLD_LAUNCH, TORCHRUN, launches
from drumline_lint.reading.shell import Script

RULE = rule("DL113")
# Training scripts have --master-addr, --master-port and --node-rank of their own.
_OF_TORCHRUN = {
    "nproc-per-node",
    "nnodes",
    "rdzv-backend",
    "rdzv-endpoint",
    "rdzv-id",
    "standalone",
}
_ONLY_LAUNCHERS = {
    TORCHRUN: _OF_TORCHRUN,
    OLD_LAUNCH: _OF_TORCHRUN,
    ACCELERATE: {"num-processes", "num-machines", "machine-rank", "main-process-ip", "multi-gpu"},
    DEEPSPEED: {"num-gpus", "num-nodes", "hostfile"},
}


def check_shell(script: Script) -> Iterator[Finding]:
    for launch in launches(script):
        names = _ONLY_LAUNCHERS.get(launch.kind, set())
        for word in launch.arguments[1:] if launch.is_sure else ():
            written = word.head.partition("=")[0]
            name = written.removeprefix("--").replace("_", "-")
            if written.startswith("--") and name in names and name not in launch.flags:
                training = launch.arguments[0].plain or "the training script"
                message = f"{written} comes after {training}, so {training} gets it and {launch.kind} does not"
                # Without the flag, deepspeed starts a rank on every GPU.
                severity = Severity.WARNING if launch.kind == DEEPSPEED else None
                yield RULE.at(script, word, message, severity=severity)
