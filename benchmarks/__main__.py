"""Make one table or several, each in processes of its own, so that one that fails does not lose the others.

python -m benchmarks step images gpt save       (make bench-gpu: what the README of benchmarks/ says of each)
python -m benchmarks cpu                        (make bench)
python -m benchmarks step images gpt save --tiny --device cpu       does every way run at all?
"""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
import warnings
from dataclasses import replace
from pathlib import Path

from benchmarks.options import Options, parse
from benchmarks.ranks import start_ranks
from benchmarks.report import publish
from benchmarks.work import fast_arithmetic
from drumline.config.schema import WatchConfig
from drumline.manager import DDPManager

TABLES = ["step", "images", "gpt", "save"]


def main() -> int:
    options = parse(__doc__, TABLES)
    if "RANK" in os.environ:
        measure_here(options)
        return 0
    failed = [table for table in options.tables if start_ranks(1, "benchmarks", table, *_flags(sys.argv[1:]))]
    if failed:
        print(f"not made: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _flags(arguments: list[str]) -> list[str]:
    return [argument for argument in arguments if argument not in TABLES]


def measure_here(options: Options) -> None:
    """On this rank, in a group of one, with a sidecar beside it."""
    # DDP finds the strides of a 1x1 convolution's gradient odd; there is nothing to it.
    warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")
    # A way that is at rest is silent for as long as the others take.
    watch = WatchConfig(sidecar="on", on_hang="report", hang_s=500.0)
    (table,) = options.tables
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        DDPManager(seed=0, device=options.device, watch=watch, run=Path(folder)) as ddp,
    ):
        fast_arithmetic()
        made = importlib.import_module(f"benchmarks.tables.{table}").make(options, ddp)
        # The goals are for the real shapes.
        publish(replace(made, goals=[]) if options.tiny else made, options.out)


if __name__ == "__main__":
    sys.exit(main())
