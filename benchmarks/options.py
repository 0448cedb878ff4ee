"""The options on the command line, which are passed on to the processes that measure."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Options:
    """For all tables; each uses what it needs."""

    tables: list[str]
    out: Path
    rounds: int | None
    tiny: bool
    device: str
    micro_batch: int
    workers: int | None
    ranks: str | None
    limit: float | None
    only: str | None
    folder: Path
    """For data and runs; removed when the table is made."""

    def as_arguments(self, table: str, folder: str) -> list[str]:
        """For the ranks that make one of the tables."""
        changed = {"tables": None, "tiny": None, "ranks": None, "limit": None, "folder": folder}
        values = {
            name: value for name, value in {**vars(self), **changed}.items() if value is not None
        }
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in values.items()]
        return [table, *flags, *(["--tiny"] if self.tiny else [])]

    def wants(self, way: str) -> bool:
        return self.only is None or any(word in way for word in self.only.split(","))

    def rounds_or(self, usual: int) -> int:
        return self.rounds or (2 if self.tiny else usual)


def parse(description: str | None, tables: Sequence[str]) -> Options:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "tables", nargs="+", choices=tables, metavar="TABLE", help=", ".join(tables)
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/bench"), help="where results go [runs/bench]"
    )
    parser.add_argument("--rounds", type=int, help="blocks of each way [by table]")
    parser.add_argument(
        "--tiny", action="store_true", help="small shapes: does every way run at all?"
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="[auto]")
    parser.add_argument("--micro-batch", type=int, default=64, help="gpt: samples at once [64]")
    parser.add_argument(
        "--workers", type=int, help="images, resnet, loading: of each way [12, 14, 2]"
    )
    parser.add_argument(
        "--ranks", help="cpu, elastic: numbers of ranks to measure on [1,2 and 2,4]"
    )
    parser.add_argument("--limit", type=float, help="give a table up after so many seconds [never]")
    parser.add_argument("--only", help="ways whose name holds one of these words: hand,ours [all]")
    parser.add_argument("--folder", type=Path, default=Path(), help=argparse.SUPPRESS)
    return Options(**vars(parser.parse_args()))
