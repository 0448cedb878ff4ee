"""What may be said on the command line; it travels as it is to the processes that measure."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Options:
    """For all tables; each takes what it needs."""

    tables: list[str]
    out: Path
    rounds: int | None
    tiny: bool
    device: str
    micro_batch: int
    workers: int
    ranks: str
    work: str | None

    def rounds_or(self, usual: int) -> int:
        return self.rounds or (2 if self.tiny else usual)


def parse(description: str | None, tables: list[str], arguments: list[str] | None = None) -> Options:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("tables", nargs="+", choices=tables, metavar="TABLE", help=", ".join(tables))
    parser.add_argument("--out", type=Path, default=Path("runs/bench"), help="where results go [runs/bench]")
    parser.add_argument("--rounds", type=int, help="blocks of each way [by table]")
    parser.add_argument("--tiny", action="store_true", help="small shapes: does every way run at all?")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="[auto]")
    parser.add_argument("--micro-batch", type=int, default=64, help="gpt: samples at once [64]")
    parser.add_argument("--workers", type=int, default=12, help="images: of each DataLoader [12]")
    parser.add_argument("--ranks", default="1,2", help="cpu, exact: numbers of ranks to measure on [1,2]")
    parser.add_argument("--work", help="cpu, exact: one of the models only")
    return Options(**vars(parser.parse_args(arguments)))
