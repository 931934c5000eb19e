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
_SHIFTS = (4, -8, 16, -20, 28, 40)  # pixels of a name's base below its point, in order of liking
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
        parts.append(text(x.end, y.at(level) - 5, "this report", "end", "tick halo"))
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
    """Names of marked points, each at the first place beside its point that is free."""
    taken = [_box(x.at(p.x) - 5, y.at(p.y) + 5, 10) for p in points]
    found = []
    for point in sorted((p for p in points if p.marked), key=lambda p: y.at(p.y)):
        width = _CHARACTER * len(point.name)
        sides = (x.at(point.x) + 8, x.at(point.x) - 8 - width)
        places = [
            (left, y.at(point.y) + shift)
            for shift in _SHIFTS
            for left in sides
            if x.start <= left and left + width <= _WIDTH
        ] or [(max(x.start, x.end - width), y.at(point.y) - 8)]
        free = (at for at in places if not any(_meet(_box(*at, width), box) for box in taken))
        left, base = next(free, places[0])
        taken.append(_box(left, base, width))
        found.append(text(round(left, 1), round(base, 1), point.name, "start", "name halo"))
    return found


def _box(left: float, base: float, width: float) -> tuple[float, float, float, float]:
    """Left, right, top and bottom of a name, or of a point as large as one letter."""
    return left, left + width, base - 10, base + 1


def _meet(one: tuple[float, float, float, float], other: tuple[float, float, float, float]) -> bool:
    return one[0] < other[1] and other[0] < one[1] and one[2] < other[3] and other[2] < one[3]
