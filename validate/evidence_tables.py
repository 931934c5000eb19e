"""Tables of what explains a verdict; parts that were not asked for give none."""

from __future__ import annotations

from headport.validate.report import Report
from headport.validate.section import Section

__all__ = ["evidence_sections"]


def evidence_sections(report: Report) -> tuple[Section, ...]:
    """Attribution, bisection, noise floor, flips, samplers, in reading order."""
    return (
        _attribution(report),
        _bisection(report),
        _noise_floor(report),
        _flips(report),
        _sampler(report),
    )


def _attribution(report: Report) -> Section:
    found = report.attribution
    columns = ("part", "KL", "top-1", "Δ ln perplexity", "max |Δlogit|", "compared")
    if found is None:
        return Section("Where the drift comes from", columns, ())
    return Section(
        f"Where the drift comes from ({found.tokens} tokens): {found.finding}",
        columns,
        tuple(
            (
                part.part,
                f"{part.kl_mean:.3e}",
                f"{part.top1_agreement:.4%}",
                f"{part.nll_difference:+.3e}",
                f"{part.max_abs_logit_error:.3e}",
                part.measured,
            )
            for part in found.parts
        ),
    )


def _bisection(report: Report) -> Section:
    found = report.bisection
    columns = ("stage", "error behind it", "its own error", "noise", "limit", "leaves")
    if found is None:
        return Section("Stages of the backbone", columns, ())
    return Section(
        f"Stages of the backbone ({found.tokens} tokens; noise: {found.noise}): {found.finding}",
        columns,
        tuple(
            (
                stage.stage,
                f"{stage.error:.2e}",
                f"{stage.own_error:.2e}",
                f"{stage.noise:.2e}",
                f"{stage.limit:.2e}",
                "no" if stage.own_error <= stage.limit else "yes",
            )
            for stage in found.stages
        ),
    )


def _noise_floor(report: Report) -> Section:
    floor = report.noise_floor
    columns = ("path", "KL", "top-1", "perplexity ratio", "max |Δlogit|")
    if floor is None:
        return Section("Reference against itself", columns, ())
    row = (
        floor.path,
        f"{floor.kl_mean:.3e}",
        f"{floor.top1_agreement:.4%}",
        f"{floor.perplexity_ratio:.9f}",
        f"{floor.max_abs_logit_error:.3e}",
    )
    return Section(f"Reference against itself ({floor.tokens} tokens)", columns, (row,))


def _flips(report: Report) -> Section:
    flips = report.flips
    all_of_them = flips.near_ties + flips.within_noise + flips.beyond_noise
    sigma = "" if flips.noise is None else f" (σ = {flips.noise:.1e})"
    title = (
        f"Other first choices: {all_of_them} of {flips.positions}; {flips.near_ties} near ties, "
        f"{flips.within_noise} within {flips.noise_factor:g} · √2 · σ of the logit noise"
        f"{sigma}, {flips.beyond_noise} beyond it"
    )
    return Section(
        title,
        ("text", "document", "token", "reference", "candidate", "margin", "logit noise σ"),
        tuple(
            (
                flip.slice,
                str(flip.document),
                str(flip.token),
                flip.reference_top1,
                flip.candidate_top1,
                f"{flip.margin:.3e}",
                f"{flip.logit_noise:.3e}",
            )
            for flip in flips.widest
        ),
    )


def _sampler(report: Report) -> Section:
    found = report.sampler
    columns = ("runtime", "parameters", "draws", "equal", "first difference")
    if found is None:
        return Section("Samplers", columns, ())
    p = "" if found.distribution_p_value is None else f", p = {found.distribution_p_value:.3g}"
    return Section(
        f"Samplers: {found.verdict}; {found.reference}; {found.distribution}{p}",
        columns,
        tuple(
            (
                case.runtime,
                case.parameters,
                str(case.draws),
                str(case.equal),
                case.first_difference or "–",
            )
            for case in found.cases
        ),
    )
