"""A bar for each way, with its middle half as a line across the end: SVG, written by hand."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

ROW = 28
LEFT = 300
WIDTH = 420
TOP = 56
OURS = "#2a6f97"
OTHERS = "#b8c4cc"
FONT = 'font-family="sans-serif" font-size="13"'


def bars(
    title: str, unit: str, rows: Sequence[tuple[str, tuple[float, float, float]]], *, foot: str = ""
) -> str:
    """`rows`: a name, and its (low, median, high)."""
    highest = max((high for _, (_, _, high) in rows), default=1.0) or 1.0
    height = TOP + ROW * len(rows) + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 110}" height="{height}" {FONT}>',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="12" y="22" font-weight="bold">{escape(title)}</text>',
        f'<text x="12" y="42" fill="#555">{escape(unit)}: median, and the middle half</text>',
    ]
    for number, (name, quarters) in enumerate(rows):
        parts += _bar(name, quarters, TOP + ROW * number, WIDTH / highest)
    parts.append(f'<text x="12" y="{height - 10}" fill="#555" font-size="11">{escape(foot)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _bar(name: str, quarters: tuple[float, float, float], top: int, scale: float) -> list[str]:
    low, middle, high = (LEFT + value * scale for value in quarters)
    colour = OURS if name.startswith("ours") else OTHERS
    centre = top + ROW / 2
    label = f"{quarters[1]:,.0f}" if quarters[1] >= 1000 else f"{quarters[1]:.3g}"
    return [
        f'<text x="{LEFT - 8}" y="{centre + 4}" text-anchor="end">{escape(name)}</text>',
        f'<rect x="{LEFT}" y="{top + 4}" width="{middle - LEFT:.1f}" height="{ROW - 8}" fill="{colour}"/>',
        f'<line x1="{low:.1f}" x2="{high:.1f}" y1="{centre}" y2="{centre}" stroke="#222" stroke-width="2"/>',
        f'<text x="{high + 8:.1f}" y="{centre + 4}">{label}</text>',
    ]
