"""What the page says, part by part; each is empty where the report has nothing for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from headport.validate.advice import next_steps
from headport.validate.evidence import Metric
from headport.validate.report import Report
from headport.validate.section import Section
from headport.validate.tables import report_sections
from headport.validate.views.grid import data_table, folded, section_table
from headport.validate.views.markup import Markup, element, joined
from headport.validate.views.plots import (
    bar_plot,
    calibration_plot,
    gate_strip,
    histogram_plot,
    interval_plot,
    percent,
    plain,
)
from headport.validate.views.positions import worst_positions
from headport.validate.views.provenance import provenance

__all__ = ["PARTS", "Part"]

Part = tuple[str, str, Callable[[Report], Markup]]  # id, title, content

_EMPTY = Markup("")


def _table(report: Report, start: str) -> Section | None:
    found = (section for section in report_sections(report) if section.title.startswith(start))
    return next(found, None)


def _plain(report: Report, *starts: str, sortable: bool = False) -> Markup:
    found = [table for start in starts if (table := _table(report, start)) is not None]
    return joined(*(section_table(table, sortable=sortable) for table in found))


def _figure(title: str, text: str, picture: Markup, *values: Markup) -> Markup:
    caption = element("figcaption", element("b", title), text)
    return element("figure", caption, picture, *values)


def _gates(report: Report) -> Markup:
    table = _table(report, "Gates")
    if table is None:
        return element("p", "No gate was held against the figures.")
    at = table.columns.index("verdict")
    columns = ("verdict", *table.columns[:at], "limit and interval", *table.columns[at + 1 :])
    rows = []
    for gate, row in zip(report.gates, table.rows, strict=True):
        label = f"{gate.metric}: {row[3]}, interval {row[4]}, limit {row[2]}"
        rows.append((row[at], *row[:at], gate_strip(gate, label), *row[at + 1 :]))
    return joined(
        element(
            "p",
            "A gate holds a figure against a limit. It passes if the figure keeps the limit and "
            "its 95 % interval keeps limit and margin, fails if the whole interval lies beyond, "
            "and is undecided in between. In the pictures green is allowed, pale green the margin, "
            "the dot the figure, the line its interval. A drift below “detectable” would not show "
            "on so many tokens.",
            class_="soft",
        ),
        data_table(table.title, columns, rows),
        _plain(report, "Against "),
    )


def _next(report: Report) -> Markup:
    return element("ol", *(element("li", step) for step in next_steps(report)))


def _measured(report: Report) -> Markup:
    reference, candidate = report.reference, report.candidate
    return joined(
        element(
            "p",
            "The reference is the PyTorch model ",
            element("b", reference.checkpoint),
            f" ({reference.model}, {reference.dtype}); the candidate is the bundle ",
            element("b", candidate.bundle),
            f" as it is shipped ({candidate.target}, {candidate.dtype}, head {candidate.head}, "
            f"{candidate.provider}). Both were fed the same tokens, and at every scored position "
            "the probabilities that they give to the next token were compared.",
        ),
        element("p", f"Protocol: {report.protocol.description}."),
        _plain(report, "Texts"),
    )


def _drift(report: Report) -> Markup:
    parts = []
    if report.attribution is not None:
        found = report.attribution
        rows = [(p.part, p.kl_mean, p.part == found.largest) for p in found.parts]
        picture = bar_plot(rows, f"KL of each part. {found.finding}", "mean KL, nats")
        text = (
            f"One part of the reference at a time was exchanged for the candidate's, on "
            f"{found.tokens} tokens: {found.finding}"
        )
        parts.append(_figure("Share of each part", text, picture))
    if report.bisection is not None:
        stages = report.bisection
        rows = [(s.stage, s.own_error, s.own_error > s.limit) for s in stages.stages]
        picture = bar_plot(rows, f"Error of each stage. {stages.finding}", "error of its own")
        text = f"Each stage was fed the reference's own state: {stages.finding}"
        parts.append(_figure("Stages of the backbone", text, picture))
    tables = _plain(report, "Where the drift", "Stages of the backbone", "Reference against itself")
    return joined(element("div", *parts, class_="figures"), tables) if parts or tables else _EMPTY


def _distributions(report: Report) -> Markup:
    found = report.distributions
    if found is None:
        return _EMPTY
    figures = (
        (
            "KL divergence per position",
            "How far the candidate's distribution lies from the reference's; a long right tail "
            f"means few positions carry the drift. {found.kl.below} positions lie left of the "
            f"axis, {found.kl.above} right of it.",
            histogram_plot(found.kl, "Histogram of KL", "KL, nats", logarithmic=True),
        ),
        (
            "Change of logits",
            f"Candidate minus reference, of {found.delta_logit_sample}. Noise is symmetric around "
            "zero; a shift or a second hump is not noise.",
            histogram_plot(found.delta_logit, "Histogram of Δlogit", "Δlogit", logarithmic=False),
        ),
        (
            "Largest |Δlogit| per position",
            "The logit of all tokens that moved most at a position.",
            histogram_plot(
                found.max_abs_logit_error,
                "Histogram of the largest |Δlogit|",
                "largest |Δlogit|",
                logarithmic=True,
            ),
        ),
    )
    ranks = _table(report, "Figures")
    kept = [row for row in ranks.rows if row[0].startswith(("kl_", "max_abs"))] if ranks else []
    percentiles = data_table("Percentiles, all texts", ("figure", "value"), [r[:2] for r in kept])
    return joined(
        element("div", *(_figure(*figure) for figure in figures), class_="figures"),
        folded("Percentiles as a table", percentiles),
    )


_BY = {
    "position": "By place in the document",
    "frequency": "By frequency of the token",
    "confidence": "By confidence of the reference",
}


def _agreement(report: Report) -> Markup:
    texts = [(s.name, s.tokens_scored, s.metrics) for s in report.slices]
    groups: list[tuple[str, str, list[tuple[str, int, Metric, Metric]]]] = [
        (
            "By text",
            "each --text file",
            [(name, count, m.top1_agreement, m.kl_mean) for name, count, m in texts],
        )
    ]
    if report.distributions is not None:
        groups += [
            (
                _BY[part.by],
                part.definition,
                [(b.name, b.tokens, b.top1_agreement, b.kl_mean) for b in part.bins],
            )
            for part in report.distributions.breakdowns
        ]
    shown = [_group(*group) for group in groups if group[2]]
    return joined(
        element(
            "p",
            "Share of positions at which both sides choose the same token, and mean KL, with 95 % "
            "intervals. A fault often shows in one kind of position only.",
            class_="soft",
        ),
        *shown,
        folded("Other kinds of positions", _plain(report, "Positions by kind")),
    )


def _group(title: str, definition: str, rows: Sequence[tuple[str, int, Metric, Metric]]) -> Markup:
    same = [(name, metric) for name, _, metric, _ in rows]
    apart = [(name, metric) for name, _, _, metric in rows]
    values = data_table(
        f"{title}: {definition}",
        ("kind", "tokens", "top-1 agreement", "interval", "mean KL", "interval "),
        [
            (name, str(count), _share(a.value), _ends(a, _share), _small(k.value), _ends(k, _small))
            for name, count, a, k in rows
        ],
    )
    pictures = (
        interval_plot(same, f"Top-1 agreement {title.lower()}", "top-1 agreement", percent),
        interval_plot(apart, f"Mean KL {title.lower()}", "mean KL, nats", plain),
    )
    return joined(
        element("h3", f"{title} ", element("span", f"({definition})", class_="soft")),
        element("div", *(element("figure", p) for p in pictures), class_="figures"),
        folded("Values", values),
    )


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.3%}"


def _small(value: float | None) -> str:
    return "–" if value is None else f"{value:.3e}"


def _ends(metric: Metric, shown: Callable[[float | None], str]) -> str:
    return "–" if metric.low is None else f"{shown(metric.low)} … {shown(metric.high)}"


def _calibrated(report: Report) -> Markup:
    if report.distributions is None:
        return _EMPTY
    found = report.distributions.calibration
    text = (
        "Of the positions at which a side gives its first choice a probability of p, that token "
        "should follow in p of all cases: then its points lie on the diagonal. What matters here "
        "is that both sides lie in the same place. Mean distance from the diagonal: reference "
        f"{_share(found.reference_error)}, candidate {_share(found.candidate_error)}."
    )
    rows = [
        (
            f"{b.low:.0%}–{b.high:.0%}",
            *(str(b.reference_positions), _share(b.reference_confidence)),
            *(_share(b.reference_accuracy), str(b.candidate_positions)),
            *(_share(b.candidate_confidence), _share(b.candidate_accuracy)),
        )
        for b in found.bins
    ]
    columns = ("bin", "reference: positions", "confidence", "accuracy", "candidate: positions")
    values = data_table("Calibration", (*columns, "confidence ", "accuracy "), rows)
    return joined(
        _figure("Accuracy over confidence", text, calibration_plot(found, "Calibration")),
        folded("Values", values),
    )


def _choices(report: Report) -> Markup:
    return _plain(report, "Other first choices", "Greedy runs", "Samplers", sortable=True)


def _figures(report: Report) -> Markup:
    return folded("All figures, of each text", _plain(report, "Figures"))


def _notes(report: Report) -> Markup:
    return element("ul", *(element("li", n) for n in report.notes)) if report.notes else _EMPTY


# In reading order.
PARTS: tuple[Part, ...] = (
    ("gates", "Gates", _gates),
    ("next", "What to do next", _next),
    ("notes", "Notes", _notes),
    ("measured", "What was measured", _measured),
    ("drift", "Where the drift comes from", _drift),
    ("distributions", "How the drift is spread", _distributions),
    ("agreement", "Agreement by kind of position", _agreement),
    ("calibration", "Calibration", _calibrated),
    ("worst", "Worst positions", worst_positions),
    ("choices", "Tokens chosen", _choices),
    ("figures", "All figures", _figures),
    ("provenance", "Provenance", provenance),
)
