"""The report of `gpu-check` for a terminal and as Markdown; what is unproven comes first."""

from __future__ import annotations

from collections.abc import Iterator

from headport.validate.gpu.report import GpuReport, StepRecord

__all__ = ["render_markdown", "render_terminal"]

_ORDER = ("unproven", "failed", "proved", "measured")


def _ordered(report: GpuReport) -> list[StepRecord]:
    return sorted(report.steps, key=lambda step: _ORDER.index(step.status))


def render_terminal(report: GpuReport) -> str:
    """One line per step, and the verdict last."""
    lines = [f"{step.status:<9} {step.name}: {step.text}" for step in _ordered(report)]
    return "\n".join([*lines, f"verdict: {report.verdict}"])


def render_markdown(report: GpuReport) -> str:
    """The report as a page."""
    return "\n".join(_page(report)) + "\n"


def _page(report: GpuReport) -> Iterator[str]:
    yield f"# GPU check: {report.verdict}"
    yield ""
    unproven = [step for step in report.steps if step.status == "unproven"]
    if unproven:
        yield f"**Unproven ({len(unproven)} of {len(report.steps)} steps):**"
        yield ""
        yield from (f"- {step.name}: {_cell(step.text)}" for step in unproven)
        yield ""
    yield "| step | result | found | seconds |"
    yield "|---|---|---|---|"
    for step in _ordered(report):
        if step.status != "unproven":
            yield f"| {step.name} | {step.status} | {_cell(step.text)} | {step.seconds:.1f} |"
    yield ""
    yield "| | |"
    yield "|---|---|"
    heads = ", ".join(f"{name}: {text}" for name, text in report.heads.items())
    options = ", ".join(f"{key}={value}" for key, value in report.provider_options.items())
    facts = {
        "bundle": f"{report.bundle} (target {report.target}, {report.dtype}; {heads})",
        "manifest": report.manifest_sha256,
        "GPU": ", ".join(report.gpus) or "none",
        "driver": f"CUDA {report.driver}" if report.driver else "none",
        "machine": report.machine,
        "provider": f"{report.provider} ({options}), operators on the CPU "
        f"{'allowed' if report.cpu_fallback else 'refused'}",
        "versions": ", ".join(f"{name} {version}" for name, version in report.versions.items()),
        "headport": f"{report.headport}, {report.date}",
    }
    yield from (f"| {name} | {_cell(value)} |" for name, value in facts.items())


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
