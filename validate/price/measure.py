"""One pass over the reference: what it thinks of removed ids, position by position.

With p the reference's distribution, q the pruned bundle's, R removed and S kept ids:

    lost mass = Σ_R p        KL = Σ_S p' ln(p' / q),  p' = p / Σ_S p

KL is taken where both sides read the same tokens: everywhere if the pruned bundle takes the ids it
took before, else up to a document's first removed token.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from headport.metrics import score_rows
from headport.progress import bar
from headport.validate.candidate import Candidate
from headport.validate.documents import Window, windows_of
from headport.validate.price.curve import KeepOrder
from headport.validate.price.kept import Kept
from headport.validate.price.material import Priced
from headport.validate.sides import ReferenceSide

__all__ = ["ALL", "Measured", "Position", "Sums", "measure"]

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]

ALL = "all"
_WORST = 12


@dataclass
class Sums:
    """Sums over the scored positions of a slice."""

    tokens: int = 0
    bytes: int = 0
    kept_tokens: int = 0
    kept_bytes: int = 0
    lost: float = 0.0
    kl: float = 0.0
    kl_tokens: int = 0


@dataclass(frozen=True, order=True)
class Position:
    """A position, ordered by how much probability it loses."""

    lost: float
    document: int  # index among the priced documents
    place: int  # of the token that follows, in its document
    removed_id: int = field(compare=False)  # the likeliest
    removed_probability: float = field(compare=False)


@dataclass
class Measured:
    """What the pass found; sums over all scored positions."""

    slices: dict[str, Sums]
    mass: Float64  # [V], Σ p
    occurrences: Int64  # [V], of the tokens that follow
    curve_lost: Float64  # [points], Σ of the probability beyond each size
    curve_covered: Float64  # [points], tokens inside each size
    nll_reference: Float64  # [texts], nats
    worst: list[Position]  # largest first


def measure(
    documents: Sequence[Priced],
    reference: ReferenceSide,
    pruned: Candidate,
    kept: Kept,
    order: KeepOrder | None,
    *,
    window: int,
    block_rows: int,
) -> Measured:
    """Score every document.

    Args:
        documents: What to score.
        reference: The PyTorch side; ready, nothing asked.
        pruned: The pruned bundle as it runs.
        kept: What it kept.
        order: By which a curve is drawn, if one is wanted.
        window: Tokens fed at once.
        block_rows: Positions whose logits are in memory at once.

    Raises:
        NonFiniteError: If a logit of either side is not finite.
    """
    scan = _Scan(documents, pruned, kept, order)
    jobs = _jobs(documents, window)
    ahead = next(jobs, None)
    if ahead is not None:
        reference.ask_score(ahead[1].token_ids)
    with bar(sum(p.document.tokens_scored for p in documents), "price", "token") as progress:
        while ahead is not None:
            (index, part), ahead = ahead, next(jobs, None)
            if ahead is not None:  # the reference computes while this side does
                reference.ask_score(ahead[1].token_ids)
            states, compared = scan.states(index, part)
            for block in reference.read_score(block_rows):
                inside = slice(block.start, block.start + len(block.logits))
                rows = block.start + np.flatnonzero(part.scored[inside])
                if len(rows):
                    z = block.logits[rows - block.start]
                    scan.add(index, part, rows, z)
                    with_states = rows < compared
                    if states is not None and with_states.any():
                        scan.compare(index, part, rows[with_states], z[with_states], states)
                progress.update(len(rows))
    return scan.found


def _jobs(documents: Sequence[Priced], window: int) -> Iterator[tuple[int, Window]]:
    for index, priced in enumerate(documents):
        for part in windows_of(priced.document, window):
            yield index, part


class _Scan:
    """Adds up positions."""

    def __init__(
        self,
        documents: Sequence[Priced],
        pruned: Candidate,
        kept: Kept,
        order: KeepOrder | None,
    ) -> None:
        size, points = len(kept.is_kept), 0 if order is None else len(order.sizes)
        self._documents, self._pruned, self._kept, self._order = documents, pruned, kept, order
        self._removed = np.flatnonzero(~kept.is_kept)
        self.found = Measured(
            slices={},
            mass=np.zeros(size),
            occurrences=np.zeros(size, np.int64),
            curve_lost=np.zeros(points),
            curve_covered=np.zeros(points),
            nll_reference=np.zeros(1 + max((p.text for p in documents), default=0)),
            worst=[],
        )

    def states(self, index: int, part: Window) -> tuple[Float32 | None, int]:
        """Hidden states of the pruned bundle, and how many positions see the same tokens."""
        fed = part.token_ids
        if self._kept.renumbered:
            before = self._documents[index].document.token_ids[: part.start]
            gone = np.flatnonzero(~self._kept.is_kept[fed])
            count = int(gone[0]) if len(gone) else len(fed)
            count = count if self._kept.is_kept[before].all() else 0
            fed = fed[:count]
        if not len(fed):
            return None, 0
        [states] = self._pruned.hidden_states([self._kept.fed(fed)])
        return states, len(fed)

    def add(self, index: int, part: Window, rows: Int64, z: Float32) -> None:
        """Add positions `rows` of a window, whose reference logits are z [N, V]."""
        found, targets = self.found, part.targets[rows]
        p = np.exp(z - z.max(axis=1, keepdims=True))
        total = p.sum(axis=1, dtype=np.float64)
        p /= total[:, None].astype(np.float32)
        lost = p[:, self._removed].sum(axis=1, dtype=np.float64)
        found.mass += p.sum(axis=0, dtype=np.float64)
        found.occurrences += np.bincount(targets, minlength=len(found.mass))
        own = z[np.arange(len(z)), targets].astype(np.float64) - z.max(axis=1)
        found.nll_reference[self._documents[index].text] += (np.log(total) - own).sum()
        if self._order is not None:
            pieces = np.add.reduceat(
                p[:, self._order.ids], self._order.starts, axis=1, dtype=np.float64
            ).sum(axis=0)
            # From the far end, where the small numbers are: nothing cancels.
            found.curve_lost += np.append(np.cumsum(pieces[::-1])[::-1], 0.0)[1:]
            places = self._order.place[targets]
            found.curve_covered += (places[:, None] < self._order.sizes).sum(axis=0)
        self._slice(index, part, rows, lost)
        self._offer(index, part, rows, p, lost)

    def compare(self, index: int, part: Window, rows: Int64, z: Float32, states: Float32) -> None:
        """Add the KL of positions that both sides see alike."""
        q = self._pruned.logits(states[rows])[:, : len(self._kept.ids)]
        p = np.ascontiguousarray(z[:, self._kept.ids])
        kl = score_rows(p, q, np.zeros(len(p), np.int64), np.zeros(len(p))).kl
        for names, value in zip(self._names(index, part, rows), kl.tolist(), strict=True):
            for name in names:
                self.found.slices[name].kl += value
                self.found.slices[name].kl_tokens += 1

    def _names(self, index: int, part: Window, rows: Int64) -> Iterator[tuple[str, ...]]:
        priced = self._documents[index]
        for row in rows.tolist():
            script = priced.scripts[part.start + row + 1]
            yield ALL, f"text {priced.name}", f"script {script}"

    def _slice(self, index: int, part: Window, rows: Int64, lost: Float64) -> None:
        sizes = self._documents[index].document.token_bytes[part.start + rows].tolist()
        is_kept = self._kept.is_kept[part.targets[rows]].tolist()
        names = self._names(index, part, rows)
        for each, size, good, mass in zip(names, sizes, is_kept, lost.tolist(), strict=True):
            for name in each:
                sums = self.found.slices.setdefault(name, Sums())
                sums.tokens += 1
                sums.bytes += size
                sums.kept_tokens += good
                sums.kept_bytes += size * good
                sums.lost += mass

    def _offer(self, index: int, part: Window, rows: Int64, p: Float32, lost: Float64) -> None:
        worst = self.found.worst
        if not len(self._removed):
            return
        for n in np.argsort(-lost)[:_WORST].tolist():
            if len(worst) >= _WORST and lost[n] <= worst[-1].lost:
                break
            likeliest = int(self._removed[p[n, self._removed].argmax()])
            place = part.start + int(rows[n]) + 1
            here = Position(float(lost[n]), index, place, likeliest, float(p[n, likeliest]))
            worst[:] = heapq.nlargest(_WORST, [*worst, here])
