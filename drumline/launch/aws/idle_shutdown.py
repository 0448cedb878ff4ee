"""Runs on each node every minute, by a timer of systemd: a node that is idle for long enough ends
itself.

Its Auto Scaling group shrinks with it, so that no other instance takes its place. Part of the user
data, so it has nothing of drumline, which a node may not have yet.
"""

import logging
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

LAST_BUSY = Path("/run/drumline-busy")
# Over the last minute, of one core; an idle node has less than 0.1.
BUSY_LOAD = 0.5
BUSY_GPU_PERCENT = 1
QUERY = ("--query-gpu=utilization.gpu", "--format=csv,noheader,nounits")


def main(instance: str, region: str, minutes: str) -> None:
    """Note whether the node is busy, and end it if it was not for so many minutes."""
    if is_busy() or not LAST_BUSY.exists():
        LAST_BUSY.touch()
    idle_s = time.time() - LAST_BUSY.stat().st_mtime
    if idle_s >= int(minutes) * 60:
        logging.warning("idle for %.0f minutes: %s ends itself", idle_s // 60, instance)
        end_instance(instance, region)


def is_busy() -> bool:
    """Whether its CPUs or its GPUs work."""
    if os.getloadavg()[0] >= BUSY_LOAD:
        return True

    program = shutil.which("nvidia-smi")
    if program is None:
        return False

    done = subprocess.run(
        [program, *QUERY],
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        check=False,
    )
    return any(float(line) >= BUSY_GPU_PERCENT for line in done.stdout.split() if line.isdigit())


def end_instance(instance: str, region: str) -> None:
    """Raises if AWS refuses; the timer tries again in a minute."""
    import boto3

    group = boto3.client("autoscaling", region_name=region)
    group.terminate_instance_in_auto_scaling_group(
        InstanceId=instance, ShouldDecrementDesiredCapacity=True
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
