"""DL113: a flag for torchrun that is given to the training script."""

from __future__ import annotations

from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.reading.launchers import launches
from drumline_lint.reading.shell import Script

RULE = rule("DL113")
# Training scripts have --master-addr, --master-port and --node-rank of their own.
_ONLY_TORCHRUN = {
    "nproc-per-node",
    "nnodes",
    "rdzv-backend",
    "rdzv-endpoint",
    "rdzv-id",
    "standalone",
}


def check_shell(script: Script) -> Iterator[Finding]:
    for launch in launches(script):
        if not launch.is_torchrun or not launch.is_sure:
            continue
        for word in launch.arguments[1:]:
            written = word.head.partition("=")[0]
            name = written.removeprefix("--").replace("_", "-")
            if written.startswith("--") and name in _ONLY_TORCHRUN and name not in launch.flags:
                training = launch.arguments[0].plain or "the training script"
                message = (
                    f"{written} comes after {training}, so {training} gets it and torchrun does not"
                )
                yield RULE.at(script, word, message)
