"""Domain × K × mode: what a pruned head weighs, takes and loses.

Each domain is counted with a fifth of its documents held out; K is the number of tokens that stay,
the largest one all that the counted part uses. Figures are of `headport price` on the rest.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.prune.texts import write_corpus
from headport.progress import say
from headport.quantize.count.command import Options as CountOptions
from headport.quantize.count.command import count
from headport.quantize.prune import Options as PruneOptions
from headport.quantize.prune import prune
from headport.validate.price.command import Options as PriceOptions
from headport.validate.price.command import price_with
from headport.validate.price.report import PriceReport
from headport.validate.reference_process import ReferenceProcess

__all__ = ["Case", "domain_table"]

_HELD_OUT = 0.2
_COLUMNS = (
    "domain",
    "mode",
    "K",
    "head MB",
    "all tensors MB",
    "head step ms",
    "lost mass",
    "tokens kept",
    "bits/byte",
    "change",
    "tokens",
)


@dataclass(frozen=True)
class Case:
    """What to compare."""

    bundle: Path  # before pruning
    reference: str
    work: Path
    sizes: tuple[int, ...]  # K; 0 keeps all that the corpus uses
    modes: tuple[str, ...]
    max_tokens: int
    chinese: Path


def domain_table(case: Case, domains: Sequence[str]) -> list[PriceReport]:
    """Print a row per domain, size and mode; returns the reports."""
    say("| " + " | ".join(_COLUMNS) + " |")
    say("|" + "---|" * len(_COLUMNS))
    reports = []
    with ReferenceProcess(case.reference) as reference:
        for domain in domains:
            counts, held = _counted(case, domain)
            for size in case.sizes:
                for mode in case.modes:
                    pruned = case.work / f"{domain}.{size}.{mode}"
                    options = PruneOptions(
                        bundle=case.bundle,
                        output=pruned,
                        counts=counts,
                        mode=mode,  # type: ignore[arg-type]
                        max_size=size or None,
                        force=True,
                    )
                    made = prune(options)
                    report = price_with(
                        reference,
                        PriceOptions(
                            bundle=case.bundle,
                            pruned=pruned,
                            reference=case.reference,
                            text=(held,),
                            max_tokens=case.max_tokens,
                            counts=counts,
                        ),
                    )
                    tensors = sum(tensor.length for tensor in made.manifest.tensors)
                    say(_row(domain, report, tensors))
                    shutil.rmtree(pruned)
                    reports.append(report)
            _suggested(domain, reports[-1])
    return reports


def _counted(case: Case, domain: str) -> tuple[Path, Path]:
    corpus = write_corpus(domain, case.work / f"{domain}.jsonl", case.chinese)
    counts, held = case.work / f"{domain}.parquet", case.work / f"{domain}.held.jsonl"
    count(
        CountOptions(
            model=case.bundle,
            corpus=(str(corpus),),
            output=counts,
            held_out=_HELD_OUT,
            held_out_text=held,
            deduplicate=True,
            force=True,
        )
    )
    return counts, held


def _row(domain: str, report: PriceReport, tensors: int) -> str:
    whole, spelling = report.slices[0], report.spelling[0]
    before, after = spelling.bits_per_byte_before, spelling.bits_per_byte_after
    cells = (
        domain,
        report.mode,
        str(report.kept),
        f"{report.head_bytes_after / 1e6:.1f} of {report.head_bytes_before / 1e6:.1f}",
        f"{tensors / 1e6:.0f}",
        f"{report.step_ms_after:.2f} of {report.step_ms_before:.2f}",
        f"{whole.lost_mass:.3%}",
        f"{whole.covered_tokens:.2%}",
        f"{before:.3f} → {after:.3f}",
        f"{after / before - 1:+.2%}",
        f"{spelling.tokens_after / spelling.tokens_before - 1:+.2%}",
    )
    return "| " + " | ".join(cells) + " |"


def _suggested(domain: str, report: PriceReport) -> None:
    assert report.curve is not None
    points = [f"{p.kept}: {p.lost_mass:.2%}" for p in report.curve.points if p.kept < report.size]
    say(f"\n{domain}, lost mass by K: {', '.join(points[::4])}")
    say(f"suggested: {report.curve.suggestion.kept} ({report.curve.suggestion.reason})\n")
