"""Efficiency over the number of ranks as an SVG file: lines with their intervals, and what is
usual."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
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


class Axes(NamedTuple):
    """Where a number of ranks and an efficiency are in the plot."""

    fewest: int
    most: int
    top: float
    """The efficiency at the top."""

    def x(self, ranks: float) -> float:
        """On a logarithmic axis."""
        low = math.log2(self.fewest)
        high = max(math.log2(self.most), low + 1)
        part = (math.log2(ranks) - low) / (high - low)
        return LEFT + part * (WIDTH - LEFT - RIGHT)

    def y(self, efficiency: float) -> float:
        part_below_top = (self.top - min(efficiency, self.top)) / self.top
        return TOP + part_below_top * (HEIGHT - TOP - BOTTOM)

    def bar(self, ranks: int, low: float, high: float, colour: str, width: int) -> str:
        """A vertical line from one efficiency to another."""
        x = self.x(ranks)
        ends = f'x1="{x:.1f}" x2="{x:.1f}" y1="{self.y(low):.1f}" y2="{self.y(high):.1f}"'
        return f'<line {ends} stroke="{colour}" stroke-width="{width}"/>'


def efficiency_svg(title: str, lines: Mapping[str, Line]) -> str:
    """The plot."""
    points = [point for line in lines.values() for point in line]
    ranks = sorted({point.ranks for point in points})
    top = max(LEAST_TOP, *(point.efficiency for point in points))
    axes = Axes(ranks[0], ranks[-1], top)

    size = f'viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}>',
        '<rect width="100%" height="100%" fill="white"/>',
        _label(LEFT, 20, title, 'font-weight="bold"'),
        _label(WIDTH / 2, HEIGHT - 8, "ranks; grey: usual"),
    ]

    for percent in range(0, round(100 * top) + 1, 20 * math.ceil(top / 2)):
        y = axes.y(percent / 100) + 4
        parts.append(_label(LEFT - 10, y, f"{percent}%", 'text-anchor="end"'))
    for count in ranks:
        parts.append(_label(axes.x(count), HEIGHT - 26, f"{count:,}"))

    for count, usual in USUAL.items():
        if ranks[0] <= count <= ranks[-1]:
            parts.append(axes.bar(count, *usual, "#bbb", 12))

    for number, (name, line) in enumerate(lines.items()):
        colour = COLOURS[number % len(COLOURS)]
        places = [(axes.x(point.ranks), axes.y(point.efficiency)) for point in line]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for point in line:
            parts.append(axes.bar(point.ranks, point.low, point.high, colour, 2))
        parts.append(_label(LEFT + 200 * number, 36, name, f'fill="{colour}"'))

    return "\n".join([*parts, "</svg>", ""])


def _label(x: float, y: float, label: str, attributes: str = 'text-anchor="middle"') -> str:
    """A text in the plot."""
    return f'<text x="{x:.1f}" y="{y:.1f}" {attributes}>{escape(label)}</text>'
