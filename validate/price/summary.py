"""From what was measured to a price tag."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headport.bundle import Bundle
from headport.quantize.count.table import TokenCounts
from headport.validate.candidate import Candidate
from headport.validate.price.curve import KeepOrder, make_curve
from headport.validate.price.kept import Kept
from headport.validate.price.material import Priced
from headport.validate.price.measure import ALL, Measured, Position, Sums
from headport.validate.price.report import (
    SCHEMA_VERSION,
    Curve,
    PriceReport,
    Removed,
    Slice,
    Worst,
)
from headport.validate.price.spelling import Spelled, longest, spelling

__all__ = ["Findings", "make_report"]

_REMOVED = 20  # removed tokens that are listed
_BEFORE_CHARACTERS = 60


@dataclass(frozen=True)
class Findings:
    """All that a price tag is made of."""

    bundle: Bundle
    pruned: Bundle
    reference: str
    reference_sha256: str  # over the checkpoint's weight files
    kept: Kept
    counts: TokenCounts | None
    documents: Sequence[Priced]
    measured: Measured
    order: KeepOrder | None
    spelled: Sequence[Spelled]
    unspelled: str  # why the text could not be spelled with kept tokens
    step_ms: Sequence[float]  # before, after
    head_bytes: tuple[int, int]


def make_report(
    found: Findings, before: Candidate, names: Sequence[str], max_lost_mass: float
) -> PriceReport:
    """The price tag.

    Args:
        found: What was measured.
        before: The bundle before pruning, for the spelling of tokens.
        names: Of the texts.
        max_lost_mass: Probability that the suggested cut may lose.
    """
    kept, measured = found.kept, found.measured
    vocabulary = found.pruned.manifest.vocabulary
    texts = spelling(found.spelled, measured.nll_reference, names)
    is_output = vocabulary.map is not None
    return PriceReport(
        schema_version=SCHEMA_VERSION,
        bundle=found.bundle.path.name,
        pruned=found.pruned.path.name,
        reference=found.reference,
        mode="both" if kept.renumbered else "output" if is_output else "none",
        size=len(kept.is_kept),
        kept=len(kept.ids),
        kept_by_reason=kept.by_reason,
        head_bytes_before=found.head_bytes[0],
        head_bytes_after=found.head_bytes[1],
        step_ms_before=found.step_ms[0],
        step_ms_after=found.step_ms[1],
        slices=tuple(_slice(name, sums) for name, sums in _ordered(measured.slices)),
        spelling=texts,
        longest=longest(found.spelled, kept, before),
        worst=tuple(_worst(each, found, before) for each in measured.worst),
        removed=_removed(found, before),
        curve=_curve(found, max_lost_mass),
        notes=tuple(_notes(found, before)),
    )


def _ordered(slices: dict[str, Sums]) -> list[tuple[str, Sums]]:
    """All, then texts in their order, then scripts by size."""
    texts = [(n, s) for n, s in slices.items() if not n.startswith("script ")]
    scripts = [(n, s) for n, s in slices.items() if n.startswith("script ")]
    return texts + sorted(scripts, key=lambda pair: -pair[1].tokens)


def _slice(name: str, sums: Sums) -> Slice:
    return Slice(
        name=name,
        tokens=sums.tokens,
        bytes=sums.bytes,
        covered_tokens=sums.kept_tokens / sums.tokens,
        covered_bytes=sums.kept_bytes / max(1, sums.bytes),
        lost_mass=sums.lost / sums.tokens,
        kl=sums.kl / sums.kl_tokens if sums.kl_tokens else None,
        kl_tokens=sums.kl_tokens,
    )


def _worst(position: Position, found: Findings, before: Candidate) -> Worst:
    priced = found.documents[position.document]
    token_id = int(priced.document.token_ids[position.place])
    return Worst(
        text=priced.name,
        document=priced.document.index,
        before=priced.before(position.place, _BEFORE_CHARACTERS),
        token=before.tokens.piece(token_id),
        kept=bool(found.kept.is_kept[token_id]),
        lost_mass=position.lost,
        removed=before.tokens.piece(position.removed_id),
        removed_probability=position.removed_probability,
    )


def _removed(found: Findings, before: Candidate) -> tuple[Removed, ...]:
    measured, total = found.measured, found.measured.slices[ALL].tokens
    mass = np.where(found.kept.is_kept, 0.0, measured.mass)
    best = [i for i in np.argsort(-mass)[:_REMOVED].tolist() if mass[i] > 0]

    def count(token_id: int) -> int | None:
        if found.counts is None:
            return None
        known = token_id < len(found.counts.counts)
        return int(found.counts.counts[token_id]) if known else 0

    return tuple(
        Removed(
            token=before.tokens.piece(i),
            id=i,
            mass=float(mass[i] / total),
            occurrences=int(measured.occurrences[i]),
            count=count(i),
        )
        for i in best
    )


def _curve(found: Findings, max_lost_mass: float) -> Curve | None:
    if found.order is None:
        return None
    tokens, size = found.measured.slices[ALL].tokens, len(found.kept.is_kept)
    before, after = found.step_ms
    return make_curve(
        found.order,
        found.measured.curve_lost / tokens,
        found.measured.curve_covered / tokens,
        bytes_per_row=found.head_bytes[0] / size,
        step_ms=((size, before), (len(found.kept.ids), after)),
        limit=max_lost_mass,
    )


def _notes(found: Findings, before: Candidate) -> list[str]:
    notes = [*found.kept.notes, f"Special tokens as the tokenizer adds: {before.special_tokens()}."]
    origin = found.bundle.manifest.provenance
    if found.reference_sha256 != origin.sha256:
        notes.append(
            f"The reference {found.reference} is not the checkpoint the bundles were exported from "
            f"({origin.checkpoint}, sha256 {origin.sha256[:16]}…)."
        )
    if found.unspelled:
        notes.append(f"The text was not spelled with kept tokens: {found.unspelled}.")
    whole = found.measured.slices[ALL]
    if whole.kl_tokens < whole.tokens:
        notes.append(
            f"KL is of {whole.kl_tokens} of {whole.tokens} positions: with ids of its own, the "
            "pruned bundle reads a document as before up to its first removed token."
        )
    if found.order is None:
        notes.append("Without --counts there is no curve over K and no suggested cut.")
    elif found.counts is not None and found.counts.record.held_out is None:
        notes.append(
            "Nothing was held out when the corpus was counted; if these texts were counted, the "
            "figures flatter."
        )
    return notes
