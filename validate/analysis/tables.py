"""An analysis as tables."""

from __future__ import annotations

from headport.validate import markdown, webpage
from headport.validate.analysis.records import AnalysisReport, Quantiles, Term
from headport.validate.section import Section
from headport.validate.tables import visible
from headport.validate.terminal import render_section

__all__ = ["headline", "render_lines", "render_markdown", "render_page"]

_TITLE = "Analysis of logits"


def headline(report: AnalysisReport) -> str:
    """What was held against what."""
    return visible(
        f"{report.bundle} and {report.reference} on {report.tokens} positions of "
        f"{', '.join(report.texts)}"
    )


def render_lines(report: AnalysisReport) -> str:
    """For a terminal."""
    return "\n\n".join([headline(report), *map(render_section, _sections(report))])


def render_markdown(report: AnalysisReport) -> str:
    """As Markdown."""
    return markdown.render_sections(_TITLE, headline(report), _sections(report))


def render_page(report: AnalysisReport) -> str:
    """As one HTML page."""
    return webpage.render_sections(_TITLE, headline(report), _sections(report))


def _sections(report: AnalysisReport) -> tuple[Section, ...]:
    found = (_terms(report), _ends(report), _loops(report), _certainty(report), _lens(report))
    return tuple(
        Section(
            visible(section.title),
            section.columns,
            tuple(tuple(visible(cell) for cell in row) for row in section.rows),
        )
        for section in found
        if section.rows
    )


def _terms(report: AnalysisReport) -> Section:
    columns = ("term", "first tokens", "mean p: reference", "candidate", "largest p: reference")
    more = ("candidate ", "best rank: reference", "candidate  ", "in top 10: reference")
    return Section(
        "Watch-list, largest rise of the candidate first",
        (*columns, *more, "candidate   ", "where it is likeliest"),
        tuple(_term(term) for term in report.terms),
    )


def _term(term: Term) -> tuple[str, ...]:
    ours, theirs = term.reference, term.candidate
    return (
        term.term,
        " ".join(f"“{token}”" for token in term.tokens),
        f"{ours.mean_probability:.3e}",
        f"{theirs.mean_probability:.3e}",
        f"{ours.max_probability:.3e}",
        f"{theirs.max_probability:.3e}",
        str(ours.best_rank),
        str(theirs.best_rank),
        str(ours.in_top_10),
        str(theirs.in_top_10),
        term.context,
    )


def _ends(report: AnalysisReport) -> Section:
    columns = ("where", "positions", "reference", "candidate")
    ends = report.ends
    if ends is None:
        return Section("Probability of the end of text", columns, ())
    rows = (
        ("end of a document", str(ends.documents), ends.reference_at_end, ends.candidate_at_end),
        ("elsewhere", "all others", ends.reference_elsewhere, ends.candidate_elsewhere),
    )
    return Section(
        f"Probability of the end of text ({' '.join(ends.tokens)})",
        columns,
        tuple(
            (where, count, *("–" if p is None else f"{p:.3e}" for p in pair))
            for where, count, *pair in rows
        ),
    )


def _loops(report: AnalysisReport) -> Section:
    both = len(report.loops)
    ours = sum(run.reference_period is not None for run in report.loops)
    theirs = sum(run.candidate_period is not None for run in report.loops)
    rows = [
        (
            run.slice,
            str(run.document),
            *(_period(run.reference_period), run.reference_text or "–"),
            *(_period(run.candidate_period), run.candidate_text or "–"),
        )
        for run in report.loops
    ]
    none = ("–", "–", "none", "–", "none", "–")
    return Section(
        f"Greedy continuations that end in a repetition: {both} of {report.prompts} prompts "
        f"(reference {ours}, candidate {theirs})",
        ("text", "document", "period: reference", "repeats", "period: candidate", "repeats "),
        tuple(rows) or ((none,) if report.prompts else ()),
    )


def _period(period: int | None) -> str:
    return "none" if period is None else f"{period} tokens"


def _certainty(report: AnalysisReport) -> Section:
    found = report.certainty
    rows = (
        ("entropy, nats: reference", found.reference_entropy),
        ("entropy, nats: candidate", found.candidate_entropy),
        ("margin, logits: reference", found.reference_margin),
        ("margin, logits: candidate", found.candidate_margin),
    )
    names = Quantiles.__struct_fields__
    return Section(
        "Certainty: percentiles over positions",
        ("figure", *names),
        tuple((title, *(f"{getattr(q, n):.4g}" for n in names)) for title, q in rows),
    )


def _lens(report: AnalysisReport) -> Section:
    found = report.lens
    if found is None:
        return Section("What the reference would say after each layer", (), ())
    columns = (
        *("after", "agrees", "p of the final choice"),
        *(f"{n}: “{visible(token)}”" for n, token in enumerate(found.tokens, 1)),
    )
    rows = [
        (
            layer.after,
            f"{layer.agreement:.0%}",
            f"{layer.of_final:.2%}",
            *(
                f"“{token}” {p:.0%}"
                for token, p in zip(layer.choices, layer.probabilities, strict=True)
            ),
        )
        for layer in found.layers
    ]
    return Section(
        "What the reference would say after each layer (logit lens): agreement with what the whole "
        f"model says at {found.positions} positions, and the likeliest next token after each of "
        f"the last {len(found.tokens)}",
        columns,
        tuple(rows),
    )
