"""Points in two figures, both better when smaller, and the line that none of them beats."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from headport.validate.views.markup import Markup, element
from headport.validate.views.plots import (
    BOTTOM,
    LEFT,
    TOP,
    bottom_axis,
    left_axis,
    line,
    plain,
    svg,
    text,
)
from headport.validate.views.scale import Scale

__all__ = ["Point", "front", "scatter_plot"]

_WIDTH, _HEIGHT = 540, 320
_RIGHT = 20
_LABEL_STEP = 14  # pixels between labels
_CHARACTER = 6.2  # pixels
_ROOM = 1.35  # factor beyond the outermost points, on logarithmic axes


@dataclass(frozen=True)
class Point:
    """One thing that is compared; `x` and `y` above 0."""

    name: str
    x: float
    y: float
    marked: bool  # filled and named in the picture


def front(points: Sequence[Point]) -> list[Point]:
    """The points that no other is at least as good as in both and better in one, by `x`."""
    kept: list[Point] = []
    for point in sorted(points, key=lambda p: (p.x, p.y)):
        if not kept or point.y < kept[-1].y:
            kept.append(point)
    return kept


def scatter_plot(
    points: Sequence[Point], label: str, axes: tuple[str, str], level: float | None
) -> Markup:
    """Both axes logarithmic; `level` is a line across, in the unit of `y`."""
    heights = [p.y for p in points] + ([] if level is None else [level])
    x = _scale([p.x for p in points], LEFT + 14, _WIDTH - _RIGHT)
    y = _scale(heights, _HEIGHT - BOTTOM, TOP + 16)
    best = front(points)
    steps = [(x.at(p.x), y.at(p.y)) for p in best]
    path = " ".join(
        f"{a:.1f},{b:.1f}"
        for (left, above), (right, below) in itertools.pairwise(steps)
        for a, b in ((left, above), (right, above), (right, below))
    )
    parts = [element("polyline", points=path, class_="front")] if path else []
    if level is not None:
        parts.append(line(x.start, y.at(level), x.end, y.at(level), "diagonal"))
    for point in sorted(points, key=lambda p: p.marked):
        parts.append(
            element(
                "circle",
                element("title", f"{point.name}: {point.x:.4g}, {point.y:.3g}"),
                cx=round(x.at(point.x), 1),
                cy=round(y.at(point.y), 1),
                r=4.5,
                class_="recipe marked" if point.marked else "recipe",
            )
        )
    return svg(
        _WIDTH,
        _HEIGHT,
        label,
        bottom_axis(x, _HEIGHT, axes[0]),
        left_axis(y, _WIDTH - _RIGHT, plain, axes[1]),
        *parts,
        *_labels(points, x, y),
    )


def _scale(values: Sequence[float], start: float, end: float) -> Scale:
    return Scale(min(values) / _ROOM, max(values) * _ROOM, start, end, logarithmic=True)


def _labels(points: Sequence[Point], x: Scale, y: Scale) -> list[Markup]:
    """Names of marked points, below each other where they would overlap."""
    placed: list[tuple[float, float, float]] = []  # left, right, height
    found = []
    for point in sorted((p for p in points if p.marked), key=lambda p: y.at(p.y)):
        width = _CHARACTER * len(point.name)
        left = min(x.at(point.x) + 8, x.end - width)
        height = y.at(point.y) - 7
        for other_left, other_right, other_height in placed:
            if left < other_right and other_left < left + width:
                height = max(height, other_height + _LABEL_STEP)
        placed.append((left, left + width, height))
        found.append(text(round(left, 1), round(height, 1), point.name, "start", "name"))
    return found
