"""Efficiency over the number of ranks as an SVG file: lines with their intervals, and what is
usual."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from drumline.runs.scaling_result import USUAL, Measurement, Prediction

WIDTH = 640
HEIGHT = 360
LEFT = 56
TOP = 44
COLOURS = ("#2a6f97", "#c05621")
Line = Sequence[tuple[int, float, float, float]]
"""Ranks, and the efficiency: low, value, high."""


def efficiency_lines(found: Prediction | Measurement) -> Mapping[str, Line]:
    """By what they show."""
    if isinstance(found, Prediction):
        return {
            f"predicted, {found.network}": [(one.ranks, *one.efficiency) for one in found.sizes]
        }
    lines: dict[str, list[tuple[int, float, float, float]]] = {}
    for one in found.sizes:
        spread = min(0.9, one.spread_s / one.step_s)
        point = (
            one.ranks,
            one.efficiency / (1 + spread),
            one.efficiency,
            one.efficiency / (1 - spread),
        )
        lines.setdefault(f"measured, {one.scaling} scaling", []).append(point)
    return lines


def efficiency_svg(title: str, lines: Mapping[str, Line]) -> str:
    """The plot; ranks are on a logarithmic axis."""
    ranks = sorted({point[0] for line in lines.values() for point in line})
    low = math.log2(ranks[0])
    high = max(math.log2(ranks[-1]), math.log2(ranks[0]) + 1)

    def x(count: float) -> float:
        return LEFT + (math.log2(count) - low) / (high - low) * (WIDTH - LEFT - 24)

    def y(value: float) -> float:
        return TOP + (1.1 - min(value, 1.1)) / 1.1 * (HEIGHT - TOP - 46)

    def text(at: float, down: float, words: object, more: str = 'text-anchor="middle"') -> str:
        return f'<text x="{at:.1f}" y="{down:.1f}" {more}>{escape(str(words))}</text>'

    def bar(at: float, first: float, last: float, colour: str, width: int = 1) -> str:
        ends = f'x1="{at:.1f}" x2="{at:.1f}" y1="{y(first):.1f}" y2="{y(last):.1f}"'
        return f'<line {ends} stroke="{colour}" stroke-width="{width}"/>'

    size = f'viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}>',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    parts += [
        text(LEFT, 20, title, 'font-weight="bold"'),
        text(WIDTH / 2, HEIGHT - 8, "ranks; grey: usual"),
    ]
    parts += [
        text(LEFT - 10, y(fifth / 5) + 4, f"{fifth * 20}%", 'text-anchor="end"')
        for fifth in range(6)
    ]
    parts += [text(x(count), HEIGHT - 26, f"{count:,}") for count in ranks]
    parts += [
        bar(x(count), *usual, "#bbb", 12)
        for count, usual in USUAL.items()
        if ranks[0] <= count <= ranks[-1]
    ]
    for number, (name, line) in enumerate(lines.items()):
        colour = COLOURS[number % len(COLOURS)]
        path = " ".join(f"{x(count):.1f},{y(value):.1f}" for count, _, value, _ in line)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [bar(x(count), least, most, colour, 2) for count, least, _, most in line]
        parts.append(text(LEFT + 200 * number, 36, name, f'fill="{colour}"'))
    return "\n".join([*parts, "</svg>", ""])
