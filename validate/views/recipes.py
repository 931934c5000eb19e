"""The recipes of a sweep beside the report's own figures: what a smaller head costs."""

from __future__ import annotations

from headport.validate.recipes import RecipeSweep
from headport.validate.report import Report
from headport.validate.views.grid import data_table
from headport.validate.views.markup import Markup, element, joined
from headport.validate.views.scatter import Point, scatter_plot

__all__ = ["recipes"]

_LEAST = 1e-12  # an exact head has no KL, and the axis is logarithmic
_COLUMNS = ("recipe", "read, MB per token", "stored, MB", "mean KL", "PPL ×", "top-1", "step, ms")


def recipes(sweep: RecipeSweep, report: Report) -> Markup:
    """Two pictures and a table."""
    level = report.metrics.kl_mean.value
    best = set(sweep.pareto)

    def points(figure: str, unit: float) -> list[Point]:
        return [
            Point(
                t.recipe.removeprefix("head="),
                getattr(t, figure) * unit,
                max(t.kl_mean, _LEAST),
                t.recipe in best,
            )
            for t in sweep.trials
        ]

    pictures = (
        ("Bytes", "read_bytes", 1e-6, "read by a token, MB"),
        ("Time", "step_ms", 1.0, "time of the head in a step, ms"),
    )
    shown = [
        element(
            "figure",
            element("figcaption", element("b", f"{title} against drift")),
            scatter_plot(
                points(figure, unit),
                f"{title} of each recipe against its mean KL",
                (axis, "mean KL, nats"),
                level if level is not None and level > 0 else None,
            ),
        )
        for title, figure, unit, axis in pictures
    ]
    rows = [
        (
            t.recipe + (" *" if t.recipe in best else ""),
            f"{t.read_bytes / 1e6:.2f}",
            f"{t.stored_bytes / 1e6:.2f}",
            f"{t.kl_mean:.2e}",
            f"{t.perplexity_ratio:.5f}",
            f"{t.top1_agreement:.2%}",
            f"{t.step_ms:.3f}",
        )
        for t in sweep.trials
    ]
    return joined(
        element(
            "p",
            "Heads that ",
            element("code", "headport sweep"),
            f" tried on {sweep.positions:,} tokens, with the backbone as it is. Lower left is "
            "better; the line joins what no other beats in the two figures of a picture. Filled "
            "and named (in the table with *) are those that no other beats in bytes, KL and time "
            "at once. The dashed line is the mean KL of this report, of the whole model: a head "
            "far below it is not what limits the bundle.",
            class_="soft",
        ),
        element("div", *shown, class_="figures wide"),
        data_table("Recipes", _COLUMNS, rows, class_="sortable"),
    )
