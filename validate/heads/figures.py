"""How far heads are from PyTorch, added up text by text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from headport.validate.evidence import Record

__all__ = ["LIMITS", "HeadFigures", "HeadSums"]

# Accepted |Δ| as a share of the largest answer, by the coarsest number format that a head's answer
# passes through. The first two are those of export's own parity; the others let rounding to that
# many bits pass, and no exchanged or lost row.
LIMITS = {
    "fp32": 2e-4,
    "fp16": 2e-2,
    "bf16": 5e-2,
    "int8": 5e-2,
    "int8-row": 5e-2,
    "fp8": 2e-1,
    "int4": 2e-1,
}
_OF_TOKENS = ("logits", "log_probs")  # arrays with a column per token; see `headport.head_answers`


class HeadFigures(Record, frozen=True):
    """One head against PyTorch, in the head's own units."""

    head: str
    kind: str  # value, tasks, vocabulary, adaptive, tree
    recipe: str  # row of the limits
    texts: int
    answers: int  # rows that were compared: positions, or texts of a head that answers per text
    largest: float  # magnitude of the reference's answers
    max_abs_error: float
    relative_error: float  # the last two's ratio
    limit: float
    same_best: float | None  # share of rows with the same best score; null of one scalar
    mean_abs_error: float
    verdict: Literal["passed", "failed", "undecided"]  # undecided: nothing was compared


@dataclass
class HeadSums:
    """Sums over texts."""

    texts: int = 0
    rows: int = 0
    values: int = 0
    largest: float = 0.0
    worst: float = 0.0
    total: float = 0.0
    best_rows: int = 0
    best_same: int = 0

    def add(
        self, found: Mapping[str, npt.NDArray[Any]], wanted: Mapping[str, npt.NDArray[Any]]
    ) -> None:
        """Add one text's arrays by name.

        One that is missing on either side, of another shape or not finite is a full miss.
        """
        self.texts += 1
        if found.keys() - wanted.keys():
            self.worst = np.inf
        for name, expected in wanted.items():
            own = found.get(name, np.zeros(0, np.float32))
            # Rows of the matrix beyond the vocabulary are no tokens; the runtime leaves them out.
            of_tokens = name in _OF_TOKENS and own.ndim == expected.ndim == 2
            if of_tokens and own.shape[1] < expected.shape[1]:
                expected = expected[:, : own.shape[1]]  # noqa: PLW2901
            self.largest = max(self.largest, float(np.abs(expected).max(initial=0.0)))
            self.rows += len(expected)
            known = own.shape == expected.shape and np.isfinite(expected).all()
            if not known or not np.isfinite(own).all():
                self.worst = np.inf
                continue
            error = np.abs(own.astype(np.float64) - expected)
            self.worst = max(self.worst, float(error.max(initial=0.0)))
            self.total += float(error.sum())
            self.values += error.size
            if expected.ndim == 2 and expected.shape[1] > 1:
                self.best_rows += len(expected)
                self.best_same += int((own.argmax(axis=1) == expected.argmax(axis=1)).sum())

    def figures(self, head: str, kind: str, recipe: str, limit: float | None) -> HeadFigures:
        """The outcome; `limit` replaces that of the recipe."""
        relative = self.worst / self.largest if self.largest else self.worst
        accepted = LIMITS[recipe] if limit is None else limit
        passed: Literal["passed", "failed"] = "passed" if relative <= accepted else "failed"
        return HeadFigures(
            head=head,
            kind=kind,
            recipe=recipe,
            texts=self.texts,
            answers=self.rows,
            largest=self.largest,
            max_abs_error=self.worst,
            relative_error=relative,
            limit=accepted,
            same_best=self.best_same / self.best_rows if self.best_rows else None,
            mean_abs_error=self.total / self.values if self.values else np.inf,
            verdict=passed if self.rows else "undecided",
        )
