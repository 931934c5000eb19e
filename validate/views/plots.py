"""The report's plots as inline SVG; colours and fonts are the page's."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from headport.validate.distributions import Calibration, Histogram
from headport.validate.evidence import Metric
from headport.validate.report import GateResult
from headport.validate.views.markup import Markup, element, joined
from headport.validate.views.scale import Scale, scale_over

__all__ = [
    "BOTTOM",
    "LEFT",
    "TOP",
    "bar_plot",
    "bottom_axis",
    "calibration_plot",
    "gate_strip",
    "histogram_plot",
    "interval_plot",
    "left_axis",
    "line",
    "percent",
    "plain",
    "svg",
    "text",
]

_WIDTH, _HEIGHT = 460, 220
LEFT, _RIGHT, TOP, BOTTOM = 46, 24, 10, 40
_NAMES = 150  # pixels for names at the left of horizontal plots
_ROW = 26
_NAME_CHARACTERS = 22
_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")

Written = Callable[[float, float], str]  # a tick and the step between ticks, as text


def svg(width: float, height: float, label: str, *children: str) -> Markup:
    """A picture: one to a screen reader, as its figures stand in a table beside it."""
    return element(
        "svg",
        *children,
        viewBox=f"0 0 {width:g} {height:g}",
        role="img",
        aria_label=label,
    )


def text(x: float, y: float, words: str, anchor: str = "middle", name: str = "tick") -> Markup:
    """Words at a place; `name` is the class that says how they look."""
    return element("text", words, x=x, y=y, text_anchor=anchor, class_=name)


def line(x1: float, y1: float, x2: float, y2: float, name: str) -> Markup:
    """A line; `name` is the class that says how it looks."""
    return element("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=name)


def plain(value: float, step: float) -> str:
    """A figure beside its axis; small and large powers of ten as such."""
    exponent = math.log10(value) if value > 0 else 0.0
    if step == 0 and abs(exponent) >= 3 and math.isclose(exponent, round(exponent)):
        return "10" + str(round(exponent)).translate(_RAISED)
    return f"{value:g}".replace("e-0", "e-")


def percent(value: float, step: float) -> str:
    """A share in per cent, with as many places as the step needs; none beyond a whole."""
    places = max(0, -math.floor(math.log10(100 * step))) if step else 0
    return f"{100 * value:.{places}f} %" if value <= 1 else ""


def _step(ticks: Sequence[float]) -> float:
    """Distance of ticks; 0 on a logarithmic axis, where it has no meaning."""
    even = len(ticks) > 1 and math.isclose(ticks[1] - ticks[0], ticks[-1] - ticks[-2], rel_tol=1e-6)
    return ticks[1] - ticks[0] if even else 0.0


def bottom_axis(scale: Scale, height: float, label: str, shown: Written = plain) -> Markup:
    """Ticks, their grid, and what they count, below a plot."""
    base = height - BOTTOM
    ticks = scale.ticks()
    step = _step(ticks)
    return joined(
        *(line(scale.at(v), TOP, scale.at(v), base, "grid") for v in ticks),
        *(text(scale.at(v), base + 15, shown(v, step)) for v in ticks),
        text((scale.start + scale.end) / 2, height - 6, label, name="label"),
    )


def left_axis(scale: Scale, right: float, shown: Written, label: str = "") -> Markup:
    """Ticks and their grid at the left of a plot; what they count stands above them."""
    ticks = scale.ticks(5)
    step = _step(ticks)
    return joined(
        *(line(LEFT, scale.at(v), right, scale.at(v), "grid") for v in ticks),
        *(text(LEFT - 5, scale.at(v) + 4, shown(v, step), "end") for v in ticks),
        *([text(2, TOP + 2, label, "start", "label")] if label else []),
    )


def histogram_plot(found: Histogram, label: str, axis: str, *, logarithmic: bool) -> Markup:
    """Counts over figures, the axis logarithmic where the bins are."""
    low, high = found.edges[0], found.edges[-1]
    x = Scale(low, high, LEFT, _WIDTH - _RIGHT, logarithmic)
    most = max(*found.counts, 1) if found.counts else 1
    y = Scale(0, most * 1.05, _HEIGHT - BOTTOM, TOP)
    bars = []
    for count, left, right in zip(found.counts, found.edges, found.edges[1:], strict=False):
        top, start = y.at(count), x.at(left)
        title = element("title", f"{left:.3g} … {right:.3g}: {count}")
        bars.append(
            element(
                "rect",
                title,
                x=start,
                y=top,
                width=round(max(x.at(right) - start - 0.8, 0.4), 2),
                height=round(y.start - top, 2),
                class_="bar",
            )
        )
    return svg(
        _WIDTH,
        _HEIGHT,
        label,
        bottom_axis(x, _HEIGHT, axis),
        left_axis(y, _WIDTH - _RIGHT, plain),
        *bars,
    )


def interval_plot(
    rows: Sequence[tuple[str, Metric]], label: str, axis: str, shown: Written
) -> Markup:
    """One figure with its interval per row, names at the left."""
    ends = [
        end
        for _, metric in rows
        for end in (metric.value, metric.low, metric.high)
        if end is not None
    ]
    height = TOP + _ROW * len(rows) + BOTTOM
    x = scale_over(ends or [0.0], (_NAMES, _WIDTH - _RIGHT - 10))
    parts = []
    for row, (name, metric) in enumerate(rows):
        middle = TOP + _ROW * (row + 0.5)
        parts.append(text(_NAMES - 8, middle + 4, _cut(name), "end", "name"))
        parts.append(_whisker(x, metric, middle))
    return svg(_WIDTH, height, label, bottom_axis(x, height, axis, shown), *parts)


def _whisker(x: Scale, metric: Metric | GateResult, y: float) -> Markup:
    parts = []
    if metric.low is not None and metric.high is not None:
        low, high = x.at(metric.low), x.at(metric.high)
        parts.append(line(low, y, high, y, "whisker"))
        parts += [line(end, y - 4, end, y + 4, "whisker") for end in (low, high)]
    if metric.value is not None:
        parts.append(element("circle", cx=x.at(metric.value), cy=y, r=4, class_="dot"))
    return joined(*parts)


def _cut(name: str) -> str:
    return name if len(name) <= _NAME_CHARACTERS else name[: _NAME_CHARACTERS - 1] + "…"


def bar_plot(rows: Sequence[tuple[str, float, bool]], label: str, axis: str) -> Markup:
    """One bar per row from zero; marked rows stand out."""
    height = TOP + _ROW * len(rows) + BOTTOM
    most = max((value for _, value, _ in rows), default=0.0)
    x = Scale(0, most * 1.1 or 1.0, _NAMES, _WIDTH - _RIGHT - 10)
    parts = []
    for row, (name, value, marked) in enumerate(rows):
        top = TOP + _ROW * row
        parts.append(text(_NAMES - 8, top + _ROW / 2 + 4, _cut(name), "end", "name"))
        parts.append(
            element(
                "rect",
                element("title", f"{value:.3e}"),
                x=x.start,
                y=top + 5,
                width=round(max(x.at(value) - x.start, 1.0), 2),
                height=_ROW - 10,
                class_="bar marked" if marked else "bar",
            )
        )
    return svg(_WIDTH, height, label, bottom_axis(x, height, axis), *parts)


def calibration_plot(found: Calibration, label: str) -> Markup:
    """Accuracy over confidence for both sides; on the diagonal the two are equal."""
    x = Scale(0, 1, LEFT, _WIDTH - _RIGHT)
    height = 300
    y = Scale(0, 1, height - BOTTOM, TOP)
    sides = (
        ("reference", [(b.reference_confidence, b.reference_accuracy) for b in found.bins]),
        ("candidate", [(b.candidate_confidence, b.candidate_accuracy) for b in found.bins]),
    )
    parts = [line(x.at(0), y.at(0), x.at(1), y.at(1), "diagonal")]
    for row, (side, points) in enumerate(sides):
        places = [(x.at(c), y.at(a)) for c, a in points if c is not None and a is not None]
        path = " ".join(f"{a:g},{b:g}" for a, b in places)
        parts.append(element("polyline", points=path, class_=f"line {side}"))
        for a, b in places:
            parts.append(_mark(side, a, b))
        parts.append(_mark(side, LEFT + 14, TOP + 14 + 18 * row))
        parts.append(text(LEFT + 24, TOP + 18 + 18 * row, side, "start", "name"))
    return svg(
        _WIDTH,
        height,
        label,
        bottom_axis(x, height, "confidence: probability of the first choice", percent),
        left_axis(y, _WIDTH - _RIGHT, percent),
        *parts,
    )


def _mark(side: str, x: float, y: float) -> Markup:
    """A point whose shape tells the sides apart as well as its colour."""
    if side == "reference":
        return element("circle", cx=x, cy=y, r=4.5, class_="mark reference")
    return element("rect", x=x - 3, y=y - 3, width=6, height=6, class_="mark candidate")


def gate_strip(gate: GateResult, label: str) -> Markup:
    """What a gate allows, its margin, and where figure and interval lie."""
    width, height = 190, 30
    edges = [edge for edge in (gate.min, gate.max) if edge is not None]
    reached = [edge - gate.margin for edge in edges] + [edge + gate.margin for edge in edges]
    known = [v for v in (gate.value, gate.low, gate.high) if v is not None]
    x = scale_over([*edges, *reached, *known], (3, width - 3), room=0.18)
    least = x.low if gate.min is None else gate.min
    most = x.high if gate.max is None else gate.max
    zones = ((gate.margin, "margin"), (0.0, "allowed"))
    parts = [
        element(
            "rect",
            x=x.at(least - margin),
            y=4,
            width=round(x.at(most + margin) - x.at(least - margin), 2),
            height=height - 8,
            class_=name,
        )
        for margin, name in zones
    ]
    limits = [line(x.at(edge), 2, x.at(edge), height - 2, "limit") for edge in edges]
    parts += [*limits, _whisker(x, gate, height / 2)]
    return svg(width, height, label, *parts)
