"""Efficiency over the number of ranks as an SVG file (`efficiency.svg.j2`): lines with their
intervals, and what is usual."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from drumline.runs.scaling_result import USUAL, Measurement, Prediction

WIDTH = 640
HEIGHT = 360
LEFT = 56
RIGHT = 24
TOP = 44
BOTTOM = 46
LEAST_TOP = 1.1
"""The efficiency at the top of the plot, unless a point is above it."""
COLOURS = ("#2a6f97", "#c05621")


class EfficiencyPoint(NamedTuple):
    """An efficiency with its interval."""

    ranks: int
    low: float
    efficiency: float
    high: float


Line = Sequence[EfficiencyPoint]


def efficiency_lines(result: Prediction | Measurement) -> Mapping[str, Line]:
    """By what they show."""
    if isinstance(result, Prediction):
        predicted = [EfficiencyPoint(size.ranks, *size.efficiency) for size in result.sizes]
        return {f"predicted, {result.network}": predicted}

    lines: dict[str, list[EfficiencyPoint]] = {}
    for size in result.sizes:
        spread = min(0.9, size.spread_s / size.step_s)
        point = EfficiencyPoint(
            ranks=size.ranks,
            low=size.efficiency / (1 + spread),
            efficiency=size.efficiency,
            high=size.efficiency / (1 - spread),
        )
        lines.setdefault(f"measured, {size.scaling} scaling", []).append(point)

    return lines


def efficiency_svg(title: str, lines: Mapping[str, Line]) -> str:
    """The plot."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    points = [point for line in lines.values() for point in line]
    ranks = sorted({point.ranks for point in points})
    top = max(LEAST_TOP, *(point.efficiency for point in points))
    lowest = math.log2(ranks[0])
    extent = max(math.log2(ranks[-1]) - lowest, 1)

    def x(count: int) -> float:
        """On a logarithmic axis."""
        return LEFT + (math.log2(count) - lowest) / extent * (WIDTH - LEFT - RIGHT)

    def y(efficiency: float) -> float:
        part_below_top = max(0.0, 1 - efficiency / top)
        return TOP + part_below_top * (HEIGHT - TOP - BOTTOM)

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    return environment.get_template("efficiency.svg.j2").render(
        title=title,
        lines=lines,
        usual=USUAL,
        colours=COLOURS,
        ranks=ranks,
        percents=range(0, round(100 * top) + 1, 20 * math.ceil(top / 2)),
        x=x,
        y=y,
        width=WIDTH,
        height=HEIGHT,
        left=LEFT,
    )
