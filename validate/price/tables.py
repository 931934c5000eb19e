"""A price tag as tables, for the terminal, Markdown and HTML."""

from __future__ import annotations

from headport.validate import markdown, webpage
from headport.validate.price.report import CurvePoint, PriceReport
from headport.validate.section import Section
from headport.validate.tables import visible
from headport.validate.terminal import render_section

__all__ = ["price_headline", "price_sections", "render_html", "render_lines", "render_page"]

_TITLE = "Price of a smaller vocabulary"
_SHOWN = ("Coverage", "The same", "Size", "Suggested", "Notes")


def price_headline(report: PriceReport) -> str:
    """What was cut and what it lost, in one line."""
    whole = report.slices[0]
    return visible(
        f"{report.pruned}: {report.kept} of {report.size} tokens of {report.bundle} (mode "
        f"{report.mode}), head {report.head_bytes_before / 1e6:.1f} → "
        f"{report.head_bytes_after / 1e6:.1f} MB; {whole.lost_mass:.3%} of {report.reference}'s "
        f"probability lost on {whole.tokens} tokens of other text"
    )


def price_sections(report: PriceReport) -> tuple[Section, ...]:
    """All tables in reading order; one without rows is left out."""
    sections = (
        _coverage(report),
        _spelling(report),
        _size(report),
        _reasons(report),
        _curve(report),
        _removed(report),
        _worst(report),
        _longest(report),
        Section("Notes", ("note",), tuple((note,) for note in report.notes)),
    )
    return tuple(
        Section(
            s.title,
            s.columns,
            tuple(tuple(visible(cell) for cell in row) for row in s.rows),
        )
        for s in sections
        if s.rows
    )


def render_lines(report: PriceReport) -> str:
    """The price tag for a terminal; the files hold all tables."""
    shown = [s for s in price_sections(report) if s.title.startswith(_SHOWN)]
    return "\n\n".join([price_headline(report), *map(render_section, shown)])


def render_page(report: PriceReport) -> str:
    """The price tag as Markdown."""
    return markdown.render_sections(_TITLE, price_headline(report), price_sections(report))


def render_html(report: PriceReport) -> str:
    """The price tag as one HTML page."""
    return webpage.render_sections(_TITLE, price_headline(report), price_sections(report))


def _coverage(report: PriceReport) -> Section:
    columns = ("slice", "tokens", "kept", "bytes kept", "lost mass", "KL to the rest")
    rows = tuple(
        (
            s.name,
            str(s.tokens),
            f"{s.covered_tokens:.3%}",
            f"{s.covered_bytes:.3%}",
            f"{s.lost_mass:.4%}",
            "–" if s.kl is None else f"{s.kl:.2e}",
        )
        for s in report.slices
    )
    return Section("Coverage of text that was not counted", columns, rows)


def _spelling(report: PriceReport) -> Section:
    columns = (
        "slice",
        "bits/byte reference",
        "before",
        "after",
        "change",
        "tokens before",
        "after",
        "longer documents",
    )
    rows = tuple(
        (
            s.name,
            f"{s.bits_per_byte_reference:.4f}",
            f"{s.bits_per_byte_before:.4f}",
            f"{s.bits_per_byte_after:.4f}",
            f"{s.bits_per_byte_after / s.bits_per_byte_before - 1:+.2%}",
            str(s.tokens_before),
            f"{s.tokens_after} ({s.tokens_after / s.tokens_before - 1:+.2%})",
            f"{s.longer_documents} of {s.documents}",
        )
        for s in report.spelling
    )
    return Section("The same bytes, before and after", columns, rows)


def _size(report: PriceReport) -> Section:
    rows = (
        ("tokens", str(report.size), str(report.kept)),
        ("head bytes", str(report.head_bytes_before), str(report.head_bytes_after)),
        ("head step, ms", f"{report.step_ms_before:.3f}", f"{report.step_ms_after:.3f}"),
    )
    return Section("Size and time", ("", "before", "after"), rows)


def _reasons(report: PriceReport) -> Section:
    rows = tuple((reason, str(count)) for reason, count in report.kept_by_reason.items())
    return Section("Kept by reason", ("reason", "tokens"), rows)


def _curve(report: PriceReport) -> Section:
    curve = report.curve
    if curve is None:
        return Section("", (), ())
    columns = ("K", "lost mass", "tokens kept", "head bytes", "head step, ms", "")
    rows = tuple((*_point(p), _mark(p, curve.suggestion.kept)) for p in curve.points)
    cut = "none" if curve.suggestion.kept is None else f"K = {curve.suggestion.kept}"
    return Section(f"Suggested cut: {cut} ({curve.suggestion.reason})", columns, rows)


def _mark(point: CurvePoint, suggested: int | None) -> str:
    return "suggested" if point.kept == suggested else ""


def _point(point: CurvePoint) -> tuple[str, ...]:
    return (
        str(point.kept),
        f"{point.lost_mass:.4%}",
        f"{point.covered_tokens:.3%}",
        str(point.head_bytes),
        "–" if point.step_ms is None else f"{point.step_ms:.3f}",
    )


def _removed(report: PriceReport) -> Section:
    columns = ("removed token", "id", "mass", "in this text", "in the corpus")
    rows = tuple(
        (
            r.token,
            str(r.id),
            f"{r.mass:.2e}",
            str(r.occurrences),
            "–" if r.count is None else str(r.count),
        )
        for r in report.removed
    )
    return Section("Removed tokens that are missed most", columns, rows)


def _worst(report: PriceReport) -> Section:
    columns = ("text", "document", "after", "came", "kept", "lost mass", "likeliest removed")
    rows = tuple(
        (
            w.text,
            str(w.document),
            w.before,
            w.token,
            "yes" if w.kept else "no",
            f"{w.lost_mass:.2%}",
            f"{w.removed} ({w.removed_probability:.2%})",
        )
        for w in report.worst
    )
    return Section("Positions that lose most", columns, rows)


def _longest(report: PriceReport) -> Section:
    columns = ("text", "document", "tokens before", "after", "for want of")
    rows = tuple(
        (
            each.text,
            str(each.document),
            str(each.tokens_before),
            str(each.tokens_after),
            " ".join(each.removed),
        )
        for each in report.longest
    )
    return Section("Documents that became longer", columns, rows)
