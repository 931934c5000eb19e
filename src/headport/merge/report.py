"""What merging did, as a record and as text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from headport.merge.parity import MergeParity
from headport.merge.runtimes import RUNTIMES

__all__ = ["MergeReport", "lines"]


@dataclass(frozen=True)
class MergeReport:
    """What merging did and how the written file answers."""

    runtimes: tuple[str, ...]
    head: str  # the graph that gives the logits
    position_ids: bool  # whether they are an input
    initializers_shared: int  # readers of a tensor that another initialiser holds already
    data_bytes: int
    changed_files: tuple[str, ...]  # companions that are not the bundle's bytes
    defaults_left_out: tuple[str, ...]  # generation defaults that genai_config.json cannot hold
    parity: MergeParity


def lines(output: Path, report: MergeReport) -> Iterator[str]:
    """The report as lines for a terminal."""
    parity = report.parity
    titles = " and ".join(RUNTIMES[name].title for name in report.runtimes)
    yield f"{output}: one graph for {titles}, logits by {report.head}"
    yield f"data      {report.data_bytes / 1e6:.1f} MB, no tensor twice"
    where = "an input" if report.position_ids else "computed from attention_mask"
    yield f"positions {where}"
    for label, found in (
        ("the bundle's session options", parity.bundle_options),
        ("ONNX Runtime's defaults", parity.default_options),
    ):
        yield (
            f"under {label}: max |Δlogit| {found.max_abs_logit_error:.2g}, "
            f"{max(found.errors.values()):.1e} of the largest (accepted {parity.limit:.0e}), first "
            f"token changed at {found.top1_changed} of {parity.positions} positions"
        )
    for name in report.runtimes:
        yield f"{RUNTIMES[name].title} opens it with {RUNTIMES[name].options}"
    for name in report.changed_files:
        yield f"note: {name} names a tokenizer class that all releases know"
    if report.defaults_left_out:
        left = ", ".join(report.defaults_left_out)
        yield f"note: genai_config.json has no field for the bundle's {left}; give them yourself"
    if not parity.default_options.within(parity.limit):
        yield "note: opened without the bundle's session options, the file answers differently"
    if parity.windows_not_crossed:
        widths = ", ".join(map(str, parity.windows_not_crossed))
        yield f"note: no run was long enough to cross attention windows of {widths} tokens"
