"""Make one table or several, each in its own processes, so that a failure does not affect the
others.

python -m benchmarks step images resnet gpt save       (make bench-gpu)
python -m benchmarks cpu                        (make bench)
python -m benchmarks step images resnet gpt save --tiny --device cpu       does every way run at all?
"""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
import warnings
from dataclasses import replace

from benchmarks.options import Options, parse
from benchmarks.ranks import start_ranks
from benchmarks.report import publish
from benchmarks.work import fast_arithmetic
from drumline.config.schema import WatchConfig
from drumline.training.manager import RunManager

TABLES = ("step", "images", "resnet", "gpt", "save", "cpu", "elastic", "loading")


def main() -> int:
    options = parse(__doc__, TABLES)
    if "RANK" in os.environ:
        measure_here(options)
        return 0
    failed = [table for table in options.tables if not _made(table, options)]
    if failed:
        print(f"not made: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _made(table: str, options: Options) -> bool:
    """Whether all runs of a table succeeded: some tables are made on several numbers of ranks."""
    numbers = str(options.ranks or getattr(_module(table), "RANKS", "1"))
    codes = []
    for number in numbers.split(","):
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            codes.append(
                start_ranks(
                    int(number),
                    "benchmarks",
                    *options.as_arguments(table, folder),
                    limit_s=options.limit,
                )
            )
    return not any(codes)


def _module(table: str) -> object:
    return importlib.import_module(f"benchmarks.tables.{table}")


def measure_here(options: Options) -> None:
    """Collective: measure on this rank, with a sidecar."""
    # DDP warns about the strides of a 1x1 convolution's gradient, which is harmless.
    warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")
    # A paused run makes no progress while the others run.
    watch = WatchConfig(sidecar="on", on_hang="report", hang_s=500.0)
    with RunManager(
        seed=0, device=options.device, watch=watch, run=options.folder / "watch"
    ) as ddp:
        fast_arithmetic()
        made = _module(options.tables[0]).make(options, ddp)  # type: ignore[attr-defined]
        if ddp.is_main_process():
            # The goals are for the real shapes.
            publish(replace(made, goals=[]) if options.tiny else made, options.out)


if __name__ == "__main__":
    sys.exit(main())
