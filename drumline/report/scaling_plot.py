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
HIGHEST = 1.1
"""The efficiency at the top of the plot."""
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
        predicted = [
            EfficiencyPoint(size.ranks, *size.efficiency) for size in result.sizes
        ]
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
    """The plot; ranks are on a logarithmic axis."""
    ranks = sorted({point.ranks for line in lines.values() for point in line})
    low = math.log2(ranks[0])
    high = max(math.log2(ranks[-1]), low + 1)

    def x(count: float) -> float:
        """The place of a number of ranks."""
        part = (math.log2(count) - low) / (high - low)
        return LEFT + part * (WIDTH - LEFT - RIGHT)

    size = f'viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}>',
        '<rect width="100%" height="100%" fill="white"/>',
        _label(LEFT, 20, title, 'font-weight="bold"'),
        _label(WIDTH / 2, HEIGHT - 8, "ranks; grey: usual"),
    ]

    for percent in range(0, 101, 20):
        y = _y(percent / 100) + 4
        parts.append(_label(LEFT - 10, y, f"{percent}%", 'text-anchor="end"'))
    for count in ranks:
        parts.append(_label(x(count), HEIGHT - 26, f"{count:,}"))

    for count, usual in USUAL.items():
        if ranks[0] <= count <= ranks[-1]:
            parts.append(_bar(x(count), *usual, "#bbb", 12))

    for number, (name, line) in enumerate(lines.items()):
        colour = COLOURS[number % len(COLOURS)]
        places = [(x(point.ranks), _y(point.efficiency)) for point in line]
        path = " ".join(f"{place_x:.1f},{place_y:.1f}" for place_x, place_y in places)
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>'
        )
        for point in line:
            parts.append(_bar(x(point.ranks), point.low, point.high, colour, 2))
        parts.append(_label(LEFT + 200 * number, 36, name, f'fill="{colour}"'))

    return "\n".join([*parts, "</svg>", ""])


def _y(efficiency: float) -> float:
    """The height of an efficiency in the plot."""
    part_below_top = (HIGHEST - min(efficiency, HIGHEST)) / HIGHEST
    return TOP + part_below_top * (HEIGHT - TOP - BOTTOM)


def _label(
    x: float, y: float, label: str, attributes: str = 'text-anchor="middle"'
) -> str:
    """A text in the plot."""
    return f'<text x="{x:.1f}" y="{y:.1f}" {attributes}>{escape(label)}</text>'


def _bar(x: float, low: float, high: float, colour: str, width: int) -> str:
    """A vertical line from one efficiency to another."""
    ends = f'x1="{x:.1f}" x2="{x:.1f}" y1="{_y(low):.1f}" y2="{_y(high):.1f}"'
    return f'<line {ends} stroke="{colour}" stroke-width="{width}"/>'
