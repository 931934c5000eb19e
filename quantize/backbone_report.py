"""What quantising a backbone did, as figures and as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from headport.bundle import Bundle
from headport.lowering.product_check import ProductCheck
from headport.lowering.product_parity import hidden_states_change
from headport.manifest import StoredMatrix
from headport.quantize.backbone_check import LookupCheck
from headport.quantize.formats import StoredWeight

__all__ = ["BackboneReport", "Stored", "backbone_lines", "backbone_report"]


@dataclass(frozen=True)
class Stored:
    """One weight that was stored in fewer bits."""

    how: StoredMatrix
    bytes_before: int
    weight: StoredWeight


@dataclass(frozen=True)
class BackboneReport:
    """What quantising a backbone did: each weight's fate, errors, sizes, and the checks."""

    formats: dict[str, int]  # format and block → weights
    left: dict[str, str]  # weights that stay as they are → why
    row_error_max: float  # ‖w − ŵ‖ / ‖w‖ of the worst output of any weight
    row_error_p99: float
    row_error_worst: str  # the weight of the worst one
    rows_lost: int  # outputs whose error is at least half their norm
    weight_bytes_before: int  # of what was stored in fewer bits
    weight_bytes_after: int
    tensor_bytes_before: int  # of the whole bundle
    tensor_bytes_after: int
    hidden_states_change: float  # ‖Δ‖ / ‖hidden states‖ on a prompt of random tokens
    check: ProductCheck | None  # None: no matrix was stored
    lookups: LookupCheck | None  # None: no embedding was stored


def backbone_report(
    before: Bundle,
    after: Bundle,
    stored: Mapping[str, Stored],
    left: dict[str, str],
    checks: tuple[ProductCheck | None, LookupCheck | None],
) -> BackboneReport:
    """Sum up; runs both bundles on one prompt."""
    errors = {name: each.weight.row_errors for name, each in stored.items()}
    worst = max(errors, key=lambda name: float(errors[name].max()))
    everything = np.concatenate(list(errors.values()))
    return BackboneReport(
        formats=dict(Counter(_shown(each.how) for each in stored.values())),
        left=left,
        row_error_max=float(errors[worst].max()),
        row_error_p99=float(np.quantile(everything, 0.99)),
        row_error_worst=worst,
        rows_lost=int((everything >= 0.5).sum()),
        weight_bytes_before=sum(each.bytes_before for each in stored.values()),
        weight_bytes_after=sum(each.weight.nbytes for each in stored.values()),
        tensor_bytes_before=sum(t.length for t in before.manifest.tensors),
        tensor_bytes_after=sum(t.length for t in after.manifest.tensors),
        hidden_states_change=hidden_states_change(before, after),
        check=checks[0],
        lookups=checks[1],
    )


def _shown(how: StoredMatrix) -> str:
    return how.format if how.block is None else f"{how.format} block {how.block}"


def backbone_lines(name: str, report: dict[str, Any]) -> Iterator[str]:
    """The report of a stage as lines for a terminal."""
    formats = ", ".join(f"{count} × {what}" for what, count in report["formats"].items())
    size = {key: f"{report[key] / 1e6:.1f} MB" for key in report if "_bytes_" in key}
    yield f"{name}: weights of the backbone stored as {formats}; {len(report['left'])} left"
    yield f"these weights {size['weight_bytes_before']} → {size['weight_bytes_after']}"
    yield f"all tensors {size['tensor_bytes_before']} → {size['tensor_bytes_after']}"
    yield (
        f"relative error of an output's weights: p99 {report['row_error_p99']:.2e}, max "
        f"{report['row_error_max']:.2e} ({report['row_error_worst']})"
    )
    if (check := report["check"]) is not None:
        share = max(check["exact_share_of_bound"], check["real_share_of_bound"])
        yield (
            f"{check['products']} products checked against float64: at most {share:.1%} of their "
            f"rounding bound ({check['values']} values)"
        )
    if (lookups := report["lookups"]) is not None:
        yield f"{lookups['rows']} rows of the embedding checked against float64"
    yield f"hidden states changed by {report['hidden_states_change']:.1%} (root mean square)"
    if report["rows_lost"]:
        yield (
            f"warning: {report['rows_lost']} outputs lost half of their norm or more; they are "
            "too small for the format"
        )
