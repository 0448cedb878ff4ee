"""DL130: deepspeed ignores CUDA_VISIBLE_DEVICES."""

from __future__ import annotations

from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.reading.allocation import processes_per_node, visible_devices
from drumline_lint.reading.launchers import DEEPSPEED, launches
from drumline_lint.reading.shell import Script

RULE = rule("DL130")


def check_shell(script: Script) -> Iterator[Finding]:
    for launch in launches(script):
        flag = launch.flags.get("num-gpus")
        include = launch.flags.get("include")
        if launch.kind == DEEPSPEED and include is not None and flag is not None:
            message = "deepspeed refuses --include beside --num_gpus"
            yield RULE.at(script, include.word, message, fix="leave out --num_gpus")
            continue
        processes = processes_per_node(launch) or 0
        devices = visible_devices(launch)
        if launch.kind != DEEPSPEED or flag is None or not processes or not devices:
            continue
        if devices != list(range(processes)):
            listed = ",".join(map(str, devices))
            message = (
                f"beside --num_gpus deepspeed ignores CUDA_VISIBLE_DEVICES={listed}, "
                f"and takes the first {processes} GPUs"
            )
            fix = f"replace both by --include localhost:{listed}"
            yield RULE.at(script, flag.word, message, fix=fix)
