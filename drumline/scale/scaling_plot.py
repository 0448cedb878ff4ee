"""Efficiency over the number of ranks as an SVG file: lines with their intervals, and what is usual."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from drumline.scale.scaling_result import USUAL, MeasuredSize, Measurement, Prediction

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 640, 360, 56, 44, 20, 46
COLOURS = ("#2a6f97", "#c05621", "#2f855a")


@dataclass(frozen=True, kw_only=True)
class EfficiencyLine:
    """The efficiency at each number of ranks, with its interval."""

    name: str
    points: tuple[tuple[int, float, float, float], ...]
    """Ranks, low, value, high."""


def predicted_line(prediction: Prediction) -> EfficiencyLine:
    points = ((one.ranks, one.low_efficiency, one.efficiency, one.high_efficiency) for one in prediction.sizes)
    return EfficiencyLine(name=f"predicted, {prediction.network}", points=tuple(points))


def measured_lines(measurement: Measurement) -> list[EfficiencyLine]:
    scalings = dict.fromkeys(one.scaling for one in measurement.sizes)
    sizes = {name: [one for one in measurement.sizes if one.scaling == name] for name in scalings}
    return [
        EfficiencyLine(name=f"measured, {name}", points=tuple(map(_measured_point, found)))
        for name, found in sizes.items()
    ]


def _measured_point(size: MeasuredSize) -> tuple[int, float, float, float]:
    spread = min(0.9, size.spread_s / size.step_s)
    return size.ranks, size.efficiency / (1 + spread), size.efficiency, size.efficiency / (1 - spread)


def efficiency_svg(title: str, lines: Sequence[EfficiencyLine]) -> str:
    """The plot; ranks are on a logarithmic axis."""
    ranks = sorted({point[0] for line in lines for point in line.points})
    low, high = math.log2(ranks[0]), max(math.log2(ranks[-1]), math.log2(ranks[0]) + 1)

    def x(count: float) -> float:
        return LEFT + (math.log2(count) - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return TOP + (1.1 - min(value, 1.1)) / 1.1 * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="12"><rect width="100%" height="100%" fill="white"/>',
        f'<text x="{LEFT}" y="20" font-weight="bold">{escape(title)}</text>',
    ]
    for fifth in range(6):
        at = y(fifth / 5)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{fifth * 20}%</text>')
    for count in ranks:
        parts.append(f'<text x="{x(count):.1f}" y="{HEIGHT - 26}" text-anchor="middle">{count:,}</text>')
    parts.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 8}" text-anchor="middle">ranks; grey: usual</text>')
    for count, (least, most) in USUAL.items():
        if ranks[0] <= count <= ranks[-1]:
            size = f'x="{x(count) - 6:.1f}" y="{y(most):.1f}" width="12" height="{y(least) - y(most):.1f}"'
            parts.append(f'<rect {size} fill="#bbb"/>')
    for number, line in enumerate(lines):
        colour = COLOURS[number % len(COLOURS)]
        path = " ".join(f"{x(point[0]):.1f},{y(point[2]):.1f}" for point in line.points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for count, least, value, most in line.points:
            ends = f'x1="{x(count):.1f}" x2="{x(count):.1f}" y1="{y(least):.1f}" y2="{y(most):.1f}"'
            parts.append(f'<line {ends} stroke="{colour}"/>')
            parts.append(f'<circle cx="{x(count):.1f}" cy="{y(value):.1f}" r="3.5" fill="{colour}"/>')
        parts.append(f'<text x="{LEFT + 190 * number}" y="36" fill="{colour}">{escape(line.name)}</text>')
    return "\n".join([*parts, "</svg>", ""])
