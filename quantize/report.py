"""What quantising did to a head: the record that is kept, and its lines for a terminal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from headport.bundle import Bundle
from headport.head_parts import find_head
from headport.manifest import Manifest
from headport.quantize.check import HeadCheck
from headport.quantize.formats import FORMATS, StoredWeight
from headport.quantize.rescoring import RescoringBytes, bytes_of

__all__ = ["CalibrationReport", "QuantizeReport", "make_report", "summary"]


@dataclass(frozen=True)
class QuantizeReport:
    """What quantising did: errors of the weight, sizes in bytes, and the check's outcome."""

    rows: int
    row_error_max: float  # ‖W_v − Ŵ_v‖ / ‖W_v‖, the worst row
    row_error_p99: float
    rows_lost: int  # rows whose error is at least half their norm
    weight_bytes_before: int  # of which nothing is freed where the weight was tied
    weight_bytes_after: int
    tensor_bytes_before: int  # of the whole bundle
    tensor_bytes_after: int
    was_tied: bool  # to the input embedding, which stays as it was
    check: HeadCheck
    rescoring: RescoringBytes | None  # None: the head gives all logits
    calibration: CalibrationReport | None = None  # None: every weight was rounded to nearest


@dataclass(frozen=True)
class CalibrationReport:
    """What error compensation was based on, and gained on it."""

    positions: int
    loss_ratio: float  # (w − ŵ) XᵀX (w − ŵ)ᵀ by that of nearest rounding, sampled rows


def make_report(
    before: Manifest,
    after: Manifest,
    name: str,
    stored: StoredWeight,
    weight_bytes: int,
    *,
    check: HeadCheck,
) -> QuantizeReport:
    """Collect the report.

    Args:
        before: Manifest of the bundle before.
        after: Manifest of the bundle after, as written.
        name: The head, or the part of one.
        stored: The stored weight.
        weight_bytes: Of the head's weight before.
        check: Outcome of the after-check.
    """
    errors = stored.row_errors
    head = find_head(after, name)
    return QuantizeReport(
        rows=len(errors),
        row_error_max=float(errors.max()),
        row_error_p99=float(np.quantile(errors, 0.99)),
        rows_lost=int((errors >= 0.5).sum()),
        weight_bytes_before=weight_bytes,
        weight_bytes_after=stored.nbytes,
        tensor_bytes_before=sum(t.length for t in before.tensors),
        tensor_bytes_after=sum(t.length for t in after.tensors),
        was_tied=find_head(before, name).tied,
        check=check,
        rescoring=bytes_of(after, head) if head.candidates is not None else None,
    )


def summary(bundle: Bundle, chosen: dict[str, Any], report: dict[str, Any]) -> str:
    """Lines for a terminal.

    Args:
        bundle: What was written.
        chosen: Options as the provenance has them.
        report: `QuantizeReport` as the provenance has it.
    """
    what = chosen["head"]
    if not chosen["symmetric"]:
        what += " with zero points"
    if chosen["block"] is not None:
        what += f", block {chosen['block']}"
    if FORMATS[chosen["head"]].grid:
        what += f", activations {chosen['activations']} once lowered"
    tied = " (the embedding, which it was tied to, stays)" if report["was_tied"] else ""
    megabytes = {key: f"{report[key] / 1e6:.1f} MB" for key in report if "_bytes_" in key}
    check = report["check"]
    which = f"head {chosen['name']}" if "name" in chosen else "head"
    lines = [
        f"{bundle.path.name}: {which} stored as {what}",
        f"head weight {megabytes['weight_bytes_before']} → {megabytes['weight_bytes_after']}{tied}",
        f"all tensors {megabytes['tensor_bytes_before']} → {megabytes['tensor_bytes_after']}",
        f"relative error of a row: p99 {report['row_error_p99']:.2e}, "
        f"max {report['row_error_max']:.2e} ({report['rows']} rows)",
        f"check against float64: max |Δlogit| {check['max_abs_logit_error']:.1e}, at most "
        f"{check['largest_share_of_bound']:.1%} of its rounding bound ({check['logits']} logits)",
    ]
    if report["calibration"]:
        found = report["calibration"]
        lines.append(
            f"errors compensated on {found['positions']} tokens: loss × {found['loss_ratio']:.3f} "
            "of nearest rounding, on that text"
        )
    if report["rescoring"]:
        lines += _rescoring_lines(bundle, report["rescoring"])
    if report["rows_lost"]:
        lines.append(
            f"warning: {report['rows_lost']} rows lost half of their norm or more; they are too "
            f"small for {chosen['head']}"
        )
    return "\n".join(lines)


def _rescoring_lines(bundle: Bundle, sizes: dict[str, Any]) -> list[str]:
    form = bundle.manifest.heads["lm"].candidates  # no other head gives any
    assert form is not None
    proof = f", ranks proved by a bound per {form.bound}" if form.certified else ""
    where = "shared with the embedding" if sizes["original_shared"] else "kept beside it"
    return [
        f"{form.count} candidates per row, scored with the original weight{proof}",
        f"original weight {sizes['original'] / 1e6:.1f} MB, {where}; certificate "
        f"{sizes['certificate'] / 1e6:.1f} MB",
        f"read per token {sizes['read_per_token'] / 1e6:.1f} MB, per fallback "
        f"{sizes['read_per_fallback'] / 1e6:.1f} MB more; held in memory "
        f"{sizes['resident'] / 1e6:.1f} MB",
    ]
