"""The table of a sweep: which recipes are worth a look, as text, Markdown and one HTML page."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

from headport.quantize.trial import Trial

__all__ = ["pareto", "render_markdown", "render_webpage", "terminal_lines"]

_COLUMNS = (
    "recipe",
    "stored MB",
    "resident MB",
    "read MB / token",
    "mean KL",
    "p99 KL",
    "PPL ×",
    "top-1",
    "top-10",
    "step ms",
    "step × before",
    "trial s",
)


def pareto(trials: Sequence[Trial]) -> tuple[str, ...]:
    """Recipes of which no other is at least as good in bytes read, KL and step, and better in one.

    Steps within 2 % of each other count as equal: they are measured, not counted.
    """

    def beats(a: Trial, b: Trial) -> bool:
        pairs = (
            (a.read_bytes, b.read_bytes),
            (a.kl_mean, b.kl_mean),
            (a.step_ratio, b.step_ratio * 1.02),
        )
        as_good = all(x <= y for x, y in pairs)
        better = (
            a.read_bytes < b.read_bytes
            or a.kl_mean < b.kl_mean
            or a.step_ratio < b.step_ratio / 1.02
        )
        return as_good and better

    return tuple(t.recipe for t in trials if not any(beats(o, t) for o in trials if o is not t))


def terminal_lines(report: dict[str, Any]) -> Iterator[str]:
    """An aligned table; recipes on the Pareto front are marked."""
    rows = [_COLUMNS, *_rows(report)]
    widths = [max(len(row[n]) for row in rows) for n in range(len(_COLUMNS))]
    for row in rows:
        first = row[0].ljust(widths[0])
        rest = (cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
        yield "  ".join((first, *rest)).rstrip()
    for recipe, why in report["refused"].items():
        yield f"refused: {recipe}: {why}"
    yield ""
    yield f"* no other recipe beats it in bytes read, KL and step at once; {_where(report)}"


def render_markdown(report: dict[str, Any]) -> str:
    """The table and the tokens each recipe hurts most."""
    lines = ["# Sweep of head recipes", "", _where(report), ""]
    lines += ["| " + " | ".join(_COLUMNS) + " |", "|" + "---|" * len(_COLUMNS)]
    lines += ["| " + " | ".join(_plain(cell) for cell in row) + " |" for row in _rows(report)]
    lines += [
        f"\nRefused: {_plain(name)}: {_plain(why)}" for name, why in report["refused"].items()
    ]
    lines += ["", "\\* on the Pareto front of bytes read, KL and step.", "", "## Hurt most", ""]
    for recipe, found in report["worst"].items():
        lines += [f"- {_plain(recipe)}: " + "; ".join(_plain(text) for text in found)]
    return "\n".join(lines) + "\n"


def render_webpage(report: dict[str, Any]) -> str:
    """The table and a plot of size against KL, in one page without scripts."""
    head = "".join(f"<th>{escape(name)}</th>" for name in _COLUMNS)
    body = "\n".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>"
        for row in _rows(report)
    )
    refused = "\n".join(
        f"<p>Refused: {escape(name)}: {escape(why)}</p>" for name, why in report["refused"].items()
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>Sweep of head recipes</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 75rem; margin: 2rem auto; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; }}
th, td {{ border-bottom: 1px solid #8886; padding: .3rem .8rem .3rem 0; text-align: right; }}
th:first-child, td:first-child {{ text-align: left; }}
svg text {{ font: 11px system-ui, sans-serif; fill: currentColor; }}
</style>
</head>
<body>
<h1>Sweep of head recipes</h1>
<p>{escape(_where(report))}</p>
{_plot(report)}
<table><thead><tr>{head}</tr></thead><tbody>
{body}
</tbody></table>
{refused}
<p>* on the Pareto front of bytes read, KL and step.</p>
</body>
</html>
"""


_WIDTH, _HEIGHT, _MARGIN = 900, 420, 60


def _plot(report: dict[str, Any]) -> str:
    """Bytes read per token against mean KL, both on logarithmic axes."""
    trials = report["trials"]
    xs = [math.log10(max(trial["read_bytes"], 1)) for trial in trials]
    ys = [math.log10(max(trial["kl_mean"], 1e-12)) for trial in trials]
    marks = []
    for trial, x, y in zip(trials, xs, ys, strict=True):
        left = _MARGIN + _place(x, xs) * (_WIDTH - 3 * _MARGIN)
        top = _MARGIN / 2 + (1 - _place(y, ys)) * (_HEIGHT - 2 * _MARGIN)
        fill = "currentColor" if trial["recipe"] in report["pareto"] else "none"
        marks.append(
            f'<circle cx="{left:.1f}" cy="{top:.1f}" r="5" fill="{fill}" stroke="currentColor"/>'
            f'<text x="{left + 8:.1f}" y="{top + 4:.1f}">{escape(trial["recipe"])}</text>'
        )
    low, high = 10 ** min(xs) / 1e6, 10 ** max(xs) / 1e6
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        'aria-label="bytes read per token against mean KL">\n' + "\n".join(marks) + "\n"
        f'<text x="{_MARGIN}" y="{_HEIGHT - 12}">read per token {low:.3g} to {high:.3g} MB, '
        f"mean KL {10 ** min(ys):.1e} to {10 ** max(ys):.1e} upwards, both logarithmic; filled: on "
        "the Pareto front</text>\n</svg>"
    )


def _place(value: float, values: Sequence[float]) -> float:
    span = max(values) - min(values)
    return (value - min(values)) / span if span else 0.5


def _rows(report: dict[str, Any]) -> list[tuple[str, ...]]:
    front = set(report["pareto"])
    return [
        (
            trial["recipe"] + (" *" if trial["recipe"] in front else ""),
            f"{trial['stored_bytes'] / 1e6:.1f}",
            _megabytes(trial["resident_bytes"]),
            f"{trial['read_bytes'] / 1e6:.1f}",
            f"{trial['kl_mean']:.1e}",
            f"{trial['kl_p99']:.1e}",
            f"{trial['perplexity_ratio']:.5f}",
            f"{trial['top1_agreement']:.2%}",
            f"{trial['top10_agreement']:.2%}",
            f"{trial['step_ms']:.2f}",
            f"{trial['step_ratio']:.2f}",
            f"{trial['seconds']:.1f}",
        )
        for trial in report["trials"]
    ]


def _megabytes(size: int | None) -> str:
    return "–" if size is None else f"{size / 1e6:.1f}"


def _where(report: dict[str, Any]) -> str:
    text = f"{report['checkpoint']}, {report['positions']} tokens of {len(report['texts'])} texts"
    if report["calibration"]:
        text += f", compensated on {report['calibration_positions']} tokens of other texts"
    return (
        f"{text}; heads written for ort-cpu and run by ONNX Runtime {report['onnxruntime']} on "
        f"{report['threads']} threads, {report['machine']}; backbone pass "
        f"{report['seconds_backbone']:.1f} s"
    )


def _plain(text: str) -> str:
    return "".join(f"&#{ord(c)};" if c in "|*_`<>[]&\\" else c for c in text)
