"""A report as tables of plain cells: the one view that every renderer lays out."""

from __future__ import annotations

import msgspec

from headport.validate.advice import next_steps
from headport.validate.evidence_tables import evidence_sections
from headport.validate.report import GateResult, GreedyRun, Metric, Metrics, Report
from headport.validate.section import Section

__all__ = [
    "gate_texts",
    "headline",
    "interval_text",
    "number_text",
    "report_sections",
    "visible",
]


def visible(text: str) -> str:
    """Text on one line with every control, bidirectional or invisible character spelt out.

    Texts and names come from files: written as they are, they could move a terminal's cursor
    or turn the reading direction of a page.
    """
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text
    )


def headline(report: Report) -> str:
    """The verdict and what it rests on, in one line."""
    documents = "document" if report.documents == 1 else "documents"
    return visible(
        f"{report.verdict.upper()}: {report.candidate.bundle} ({report.candidate.target}, head "
        f"{report.candidate.head}) against {report.reference.checkpoint}, "
        f"{report.tokens_scored} tokens of {report.documents} {documents}"
    )


def report_sections(report: Report) -> tuple[Section, ...]:
    """All sections in reading order; one without rows is left out."""
    sections = (
        _gates(report),
        _regressions(report),
        Section("What to do next", ("step",), tuple((step,) for step in next_steps(report))),
        _metrics(report),
        *evidence_sections(report),
        _position_slices(report),
        _greedy(report),
        _worst(report),
        Section("Notes", ("note",), tuple((note,) for note in report.notes)),
        _texts(report),
        _facts("Protocol", _protocol(report)),
        _facts("Reference", _reference(report)),
        _facts("Candidate", _candidate(report)),
        _facts("Machine and time", _machine(report)),
    )
    return tuple(_made_visible(section) for section in sections if section.rows)


def _made_visible(section: Section) -> Section:
    return Section(
        section.title,
        tuple(visible(cell) for cell in section.columns),
        tuple(tuple(visible(cell) for cell in row) for row in section.rows),
    )


# metric → how it is written; the first row whose part occurs in the metric's name.
_FORMATS = (
    ("agreement", "{:.4%}"),
    ("_order", "{:.4%}"),
    ("perplexity_ratio", "{:.6f}"),
    ("perplexity_", "{:.5f}"),
    ("bits_per_byte_", "{:.5f}"),
    ("rank_mean", "{:.4f}"),
    ("", "{:.3e}"),
)


def number_text(metric: str, value: float | None) -> str:
    """A figure as tables write it; a dash where there is none."""
    if value is None:
        return "–"
    return next(form for part, form in _FORMATS if part in metric).format(value)


def interval_text(metric: str, low: float | None, high: float | None) -> str:
    """An interval as tables write it."""
    if low is None or high is None:
        return "–"
    return f"{number_text(metric, low)} … {number_text(metric, high)}"


def _gates(report: Report) -> Section:
    return Section(
        f"Gates ({report.gates_source})",
        ("metric", "text", "limit", "value", "95 % interval", "verdict", "why", "detectable"),
        tuple(
            (
                gate.metric,
                "all" if gate.slice is None else gate.slice,
                _limit(gate),
                number_text(gate.metric, gate.value),
                interval_text(gate.metric, gate.low, gate.high),
                gate.verdict,
                _why(gate),
                _detectable(gate),
            )
            for gate in report.gates
        ),
    )


def gate_texts(report: Report) -> tuple[str, ...]:
    """Each gate's figure, interval and limit in one line, and what leaves it undecided."""
    texts = []
    for metric, _, limit, value, interval, _, why, _ in _gates(report).rows:
        ends = "" if interval == "–" else f", 95 % interval {interval}"
        texts.append(f"{metric} {value}{ends}, limit {limit}" + ("" if why == "–" else f"; {why}"))
    return tuple(texts)


def _limit(gate: GateResult) -> str:
    parts = [("≥", gate.min), ("≤", gate.max)]
    limit = " and ".join(f"{sign} {bound:g}" for sign, bound in parts if bound is not None)
    return f"{limit}, margin {gate.margin:g}" if gate.margin else limit


def _why(gate: GateResult) -> str:
    if gate.verdict != "undecided":
        return "by its value" if gate.by == "value" else "–"
    more = f"; about {gate.tokens_needed} tokens would decide" if gate.tokens_needed else ""
    return gate.reason + more


def _detectable(gate: GateResult) -> str:
    if gate.detectable is None or gate.by == "value":
        return "–"
    least = f"{gate.detectable:.1e}"
    if gate.tokens_recommended is None:
        return least
    return f"{least}; {gate.tokens_recommended} tokens find a drift as large as the limit"


def _regressions(report: Report) -> Section:
    return Section(
        f"Against {report.baseline}",
        ("metric", "before", "now", "worse by", "95 % interval", "margin", "verdict"),
        tuple(
            (
                found.metric,
                number_text(found.metric, found.baseline),
                number_text(found.metric, found.value),
                "–" if found.worsening is None else f"{found.worsening:+.2e}",
                "–" if found.low is None else f"{found.low:+.2e} … {found.high:+.2e}",
                f"{found.margin:.2e}",
                found.verdict,
            )
            for found in report.regressions
        ),
    )


def _metrics(report: Report) -> Section:
    columns = [("all", report.metrics), *((part.name, part.metrics) for part in report.slices)]
    names = [field.name for field in msgspec.structs.fields(Metrics)]
    return Section(
        "Figures",
        ("metric", columns[0][0], "95 % interval", *(name for name, _ in columns[1:])),
        tuple(
            (
                name,
                number_text(name, of_all.value),
                interval_text(name, of_all.low, of_all.high),
                *(number_text(name, getattr(metrics, name).value) for _, metrics in columns[1:]),
            )
            for name in names
            for of_all in [_metric(report.metrics, name)]
        ),
    )


def _metric(metrics: Metrics, name: str) -> Metric:
    found: Metric = getattr(metrics, name)
    return found


_OF_POSITIONS = ("top1_agreement", "perplexity_ratio", "kl_mean", "kl_p99")


def _position_slices(report: Report) -> Section:
    return Section(
        "Positions by kind",
        ("positions", "which", "tokens", *_OF_POSITIONS),
        tuple(
            (
                kind.name,
                kind.definition,
                str(kind.tokens_scored),
                *(number_text(name, _metric(kind.metrics, name).value) for name in _OF_POSITIONS),
            )
            for kind in report.position_slices
            if kind.tokens_scored
        ),
    )


def _greedy(report: Report) -> Section:
    return Section(
        "Greedy runs",
        (
            "text",
            "document",
            "first divergence",
            "reference margin",
            "near tie",
            "reference / candidate",
        ),
        tuple(_greedy_row(part.name, run) for part in report.slices for run in part.greedy),
    )


def _greedy_row(name: str, run: GreedyRun) -> tuple[str, ...]:
    if run.first_divergence is None:
        none = f"none in {run.new_tokens}"
        return (name, str(run.document), none, "–", "–", f"“{run.reference_text}”")
    return (
        name,
        str(run.document),
        f"token {run.first_divergence} of {run.new_tokens}",
        f"{run.reference_margin:.3e} (bound {run.near_tie_bound:.3e})",
        "yes" if run.near_tie else "no",
        f"“{run.reference_text}” / “{run.candidate_text}”",
    )


_WORST = 10  # rows; the page holds all


def _worst(report: Report) -> Section:
    return Section(
        "Positions with the largest KL",
        ("text", "document", "token", "KL", "context", "next", "reference", "candidate", "margin"),
        tuple(
            (
                found.slice,
                str(found.document),
                str(found.token),
                f"{found.kl:.3e}",
                found.context,
                found.target,
                found.reference_top1,
                found.candidate_top1,
                f"{found.reference_margin:.3e}",
            )
            for found in report.worst[:_WORST]
        ),
    )


def _texts(report: Report) -> Section:
    return Section(
        "Texts",
        ("text", "file", "bytes", "documents", "tokens scored", "bytes scored", "sha256"),
        tuple(
            (
                part.name,
                part.file,
                str(part.bytes),
                str(part.documents),
                str(part.tokens_scored),
                str(part.bytes_scored),
                part.sha256[:16] + "…",
            )
            for part in report.slices
        ),
    )


def _facts(title: str, rows: tuple[tuple[str, str], ...]) -> Section:
    return Section(title, ("what", "value"), rows)


def _protocol(report: Report) -> tuple[tuple[str, str], ...]:
    protocol = report.protocol
    bounds = protocol.near_tie_bound_median, protocol.near_tie_bound_max
    shown = " / ".join("–" if bound is None else f"{bound:.3e}" for bound in bounds)
    slope = "head not found" if protocol.head_slope is None else f"{protocol.head_slope:.6g}"
    return (
        ("in short", protocol.description),
        ("document", protocol.documents),
        ("counting", protocol.counting),
        ("special tokens", protocol.special_tokens),
        ("window", f"{protocol.window} of a context of {protocol.context} tokens"),
        ("overlap", f"{protocol.overlap} tokens"),
        ("not scored", ", ".join(map(str, protocol.ignored_ids)) or "no token id"),
        ("known of the reference", "its likeliest tokens" if protocol.top_only else "all logits"),
        *((("condition", protocol.condition),) if protocol.condition else ()),
        ("weights", protocol.weights),
        ("intervals", protocol.confidence),
        ("runs", f"batches of {protocol.batch_size}, chunks of {protocol.chunk} tokens"),
        ("tokens asked for", str(protocol.max_tokens) if protocol.max_tokens else "all"),
        ("near tie", f"reference logits closer than {protocol.near_tie_bound}"),
        ("its median / largest", shown),
        ("head slope", slope),
        (
            "greedy runs",
            f"{protocol.greedy_new_tokens} tokens after {protocol.greedy_prompt_tokens}, "
            f"{protocol.greedy_prompts} per text",
        ),
    )


def _reference(report: Report) -> tuple[tuple[str, str], ...]:
    facts = report.reference
    return (
        ("checkpoint", f"{facts.checkpoint} ({facts.format}, sha256 {facts.sha256[:16]}…)"),
        ("model", f"{facts.model}, {facts.parameters} parameters, {facts.dtype}"),
        ("attention", facts.attention),
        ("tokenizer", f"{facts.tokenizer}, logits over {facts.vocab_size}"),
        ("versions", _pairs(facts.versions)),
        ("threads", str(facts.threads)),
    )


def _candidate(report: Report) -> tuple[tuple[str, str], ...]:
    facts = report.candidate
    return (
        ("bundle", f"{facts.bundle} (manifest sha256 {facts.manifest_sha256[:16]}…)"),
        ("from", f"{facts.checkpoint} (sha256 {facts.checkpoint_sha256[:16]}…)"),
        ("stages", " → ".join(facts.stages)),
        ("target", f"{facts.target}, {facts.dtype}, head {facts.head}"),
        ("session options", _pairs(facts.session_options) or "none"),
        ("provider", facts.provider),
        ("versions", _pairs(facts.versions)),
        ("threads", str(facts.threads)),
    )


def _machine(report: Report) -> tuple[tuple[str, str], ...]:
    machine, timing = report.machine, report.timing
    memory = f", {machine.memory_bytes / 2**30:.0f} GiB" if machine.memory_bytes else ""
    return (
        ("machine", f"{machine.cpu}, {machine.cpus} CPUs usable{memory}"),
        ("system", f"{machine.system}, Python {machine.python}, headport {report.headport}"),
        ("date", report.date),
        (
            "seconds",
            f"scoring {timing.total:.1f} (reference {timing.reference:.1f} and candidate "
            f"{timing.candidate:.1f} at the same time, statistics {timing.metrics:.1f}), "
            f"greedy runs {timing.greedy:.1f}, split, noise floor and samplers {timing.extra:.1f}",
        ),
    )


def _pairs(values: dict[str, str]) -> str:
    return ", ".join(f"{key} {value}" for key, value in values.items())
