"""The output of a table: text for the terminal and docs/performance.md, JSON, and a plot.

Values are medians over blocks, with the middle half in parentheses. Medians decide whether a goal
is met.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.plot import bars

PEERS = ("lightning", "accelerate")


@dataclass(frozen=True)
class Row:
    """A way, and its measurements in the table's unit."""

    way: str
    values: list[float] = field(default_factory=list)
    failure: str | None = None

    @property
    def median(self) -> float:
        return quartiles(self.values)[1]


@dataclass(frozen=True)
class Goal:
    """A goal, and what was reached."""

    text: str
    reached: float | None
    """None: it could not be measured."""
    at_least: float | None = None
    at_most: float | None = None

    def line(self) -> str:
        expected = (
            f"at least {self.at_least:,g}"
            if self.at_least is not None
            else f"at most {self.at_most:,g}"
        )
        if self.reached is None:
            return f"{self.text}, {expected}: not measured"
        is_met = self.reached >= (self.at_least or 0.0) and self.reached <= (
            self.at_most or float("inf")
        )
        return f"{self.text}, {expected}: {figure(self.reached)}, {'met' if is_met else 'NOT MET'}"


@dataclass(frozen=True)
class Table:
    """One table of docs/performance.md."""

    name: str
    title: str
    unit: str
    rows: list[Row]
    how: str
    goals: list[Goal] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    is_one_work: bool = True
    """Whether each row may be compared with the first."""

    def row(self, way: str) -> Row | None:
        return next((row for row in self.rows if row.way == way and row.values), None)


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """The median between the ends of the middle half."""
    low, middle, high = (
        statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [*values] * 3
    )
    return low, middle, high


def figure(value: float) -> str:
    """Four significant digits, or all digits of a large number."""
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.{3 if abs(value) < 10 else 2 if abs(value) < 100 else 1}f}"


def described(values: Sequence[float]) -> str:
    low, middle, high = quartiles(values)
    return f"{figure(middle):>10} ({figure(low)} to {figure(high)})"


def ratio(table_row: Row | None, base_row: Row | None) -> float | None:
    """Of two medians, where both were measured."""
    return None if table_row is None or base_row is None else table_row.median / base_row.median


def machine() -> str:
    """The machine and the versions."""
    gpu = [torch.cuda.get_device_name()] if torch.cuda.is_available() else []
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    here = [
        *gpu,
        f"{cores} {platform.machine()} cores",
        f"{platform.system()} {platform.release()}",
    ]
    return ", ".join([*here, f"torch {torch.__version__}", f"Python {platform.python_version()}"])


def peer_versions() -> list[str]:
    """One line that names the peers, and one for each that is missing."""
    installed = []
    missing = []
    for name in PEERS:
        try:
            installed.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            missing.append(
                f"{name} is not installed, so its rows are missing: pip install '.[bench]' in a checkout of drumline"
            )
    one_rank = (
        ["Accelerate leaves DDP out where there is one process"]
        if "accelerate" in " ".join(installed)
        else []
    )
    return ([f"peers: {', '.join(installed)}"] if installed else []) + one_rank + missing


def text_of(table: Table) -> str:
    width = max(len(row.way) for row in table.rows)
    first = next((row for row in table.rows if row.values), None)
    lines = [table.title, machine(), table.how, f"{'way':<{width}} {table.unit:>10} (middle half)"]
    for row in table.rows:
        if row.failure is not None or first is None or not row.values:
            lines.append(f"{row.way:<{width}} failed: {row.failure}")
        else:
            factor = f"x {row.median / first.median:.3f}" if table.is_one_work else ""
            lines.append(f"{row.way:<{width}} {described(row.values):<34} {factor}".rstrip())
    return "\n".join([*lines, *table.notes, *(f"goal: {goal.line()}" for goal in table.goals)])


def publish(table: Table, folder: Path) -> None:
    """Print the table, and write it to the folder as text, JSON and SVG."""
    folder.mkdir(parents=True, exist_ok=True)
    text = text_of(table)
    print(f"\n{text}", flush=True)
    document: dict[str, Any] = {
        "machine": machine(),
        **asdict(table),
        "goals": [{**asdict(goal), "line": goal.line()} for goal in table.goals],
    }
    (folder / f"{table.name}.txt").write_text(f"{text}\n")
    (folder / f"{table.name}.json").write_text(json.dumps(document, indent=1) + "\n")
    drawn = [(row.way, quartiles(row.values)) for row in table.rows if row.values]
    (folder / f"{table.name}.svg").write_text(bars(table.title, table.unit, drawn, foot=machine()))
