"""Runs on each node every minute, by a timer of systemd: a node that is idle for long enough ends itself.

Its Auto Scaling group shrinks with it, so that no other instance takes its place.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from drumline.aws.account import connect
from drumline.config import FlagTable, read_flags
from drumline.config.schema import Count
from drumline.errors import ConfigError
from drumline.terminal import print_message
from drumline.text import plural

LAST_BUSY = Path("/run/drumline-busy")
LOAD = Path("/proc/loadavg")
# Over the last minute, of one core; an idle node has less than 0.1.
BUSY_LOAD = 0.5
BUSY_GPU_PERCENT = 1
QUERY = ("--query-gpu=utilization.gpu", "--format=csv,noheader,nounits")
FLAGS: FlagTable = {"instance": (str, "ID", ""), "region": (str, "REGION", ""), "minutes": (Count, "MIN", "")}


def main(argv: Sequence[str]) -> None:
    flags = read_flags(argv, FLAGS, no_settings="is a setting of a run")
    if flags.layer.problems or flags.own.keys() != FLAGS.keys():
        raise ConfigError([*flags.layer.problems, "needed: --instance ID --region REGION --minutes N"])
    given = flags.own
    if is_busy() or not LAST_BUSY.exists():
        LAST_BUSY.touch()
    idle_s = time.time() - LAST_BUSY.stat().st_mtime
    if idle_s >= given["minutes"] * 60:
        print_message(f"idle for {plural(idle_s // 60, 'minute')}: {given['instance']} ends itself")
        end_instance(given["instance"], given["region"])


def is_busy() -> bool:
    if float(LOAD.read_text(encoding="ascii").split()[0]) >= BUSY_LOAD:
        return True
    if (program := shutil.which("nvidia-smi")) is None:
        return False
    done = subprocess.run([program, *QUERY], capture_output=True, encoding="utf-8", errors="replace", check=False)
    return any(float(line) >= BUSY_GPU_PERCENT for line in done.stdout.split() if line.isdigit())


def end_instance(instance: str, region: str) -> None:
    """Raises if AWS refuses; the timer tries again in a minute."""
    connect(region, None).call(
        "autoscaling",
        "terminate_instance_in_auto_scaling_group",
        InstanceId=instance,
        ShouldDecrementDesiredCapacity=True,
    )


if __name__ == "__main__":
    main(sys.argv[1:])
