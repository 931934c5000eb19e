"""Which tokens stay: what a corpus uses, what the caller names, and what these need."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headport.errors import UsageError
from headport.quantize.prune.closure import Closure

__all__ = ["Limits", "Selection", "Wanted", "select"]

Int64 = npt.NDArray[np.int64]

_LEAST = 256
_SHOWN = 20  # tokens named in a message


@dataclass(frozen=True)
class Limits:
    """How far down the list of tokens by count to go; the list ends where one limit is reached."""

    min_count: int = 1
    coverage: float = 1.0  # share of the counted tokens
    max_size: int | None = None  # tokens in all
    least: int | None = None  # tokens that the counts must choose; None: by the vocabulary's size


@dataclass(frozen=True)
class Wanted:
    """What the caller has to say about single ids."""

    counts: Int64 | None  # [V], by id; None where there is no corpus
    keep: frozenset[int] = frozenset()
    drop: frozenset[int] = frozenset()
    union: tuple[Int64, ...] = ()  # ids of other texts, the most frequent first


@dataclass(frozen=True)
class Selection:
    """The kept ids and why each is there."""

    kept: Int64  # ascending, [K]
    by_reason: dict[str, int]  # reason → ids for which no earlier reason holds; the sum is K
    chosen: int  # by the counts, always kept ones left out
    dropped: int  # not kept because of `drop`
    covered: float | None  # share of the counted tokens whose id is kept


def select(closure: Closure, available: Iterable[int], wanted: Wanted, limits: Limits) -> Selection:
    """Choose the kept ids.

    Ids are taken by count, the most frequent first and the lower id first among equals, each with
    the ids it needs, until a limit is reached. What is always kept, named by the caller, or among
    the most frequent of other texts comes before, whatever the limits say.

    Args:
        closure: What is always kept, and what each token needs.
        available: Ids that the bundle can still give.
        wanted: Counts and named ids.
        limits: Where to stop.

    Raises:
        UsageError: If an always kept token is to be dropped, a token is to be kept and dropped, the
            fixed part alone exceeds `max_size`, or the counts choose too few tokens.
    """
    _check_drop(closure, wanted)
    usable = frozenset(available)
    picked = _Picked(closure, usable, wanted.drop)
    for reason, always in closure.always.items():
        picked.add_all(reason, sorted(always))
    picked.add_all("--keep", sorted(wanted.keep))
    for others in wanted.union:
        picked.add_all("--union", others.tolist())
    if limits.max_size is not None and len(picked.reasons) > limits.max_size:
        raise UsageError(
            f"--max-size {limits.max_size}: {len(picked.reasons)} tokens stay in any case "
            f"({_listed(picked.by_reason())}); allow at least so many"
        )
    if wanted.counts is not None or limits.min_count == 0:
        counts = np.zeros(closure.size, np.int64) if wanted.counts is None else wanted.counts
        _check_least(closure, counts, _by_count(counts, limits), limits)
        for token_id in _by_count(counts, limits):
            if not picked.add("corpus", int(token_id), limits.max_size):
                break
    kept = np.array(sorted(picked.reasons), np.int64)
    counted = 0 if wanted.counts is None else int(wanted.counts.sum())
    return Selection(
        kept=kept,
        by_reason=picked.by_reason(),
        chosen=picked.by_reason().get("corpus", 0),
        dropped=len(picked.refused),
        covered=float(wanted.counts[kept].sum() / counted)
        if wanted.counts is not None and counted
        else None,
    )


class _Picked:
    """Ids with the first reason for each."""

    def __init__(self, closure: Closure, usable: frozenset[int], drop: frozenset[int]) -> None:
        self._closure, self._usable, self._drop = closure, usable, drop
        self.reasons: dict[int, str] = {}
        self.refused: set[int] = set()

    def add(self, reason: str, token_id: int, limit: int | None = None) -> bool:
        """Add an id and what it needs; False where that would exceed the limit."""
        if token_id not in self._usable:
            return True
        needed = self._closure.with_needs(token_id)
        if needed & self._drop or not needed <= self._usable:
            self.refused.add(token_id)
            return True
        new = needed - self.reasons.keys()
        if limit is not None and len(self.reasons) + len(new) > limit:
            return False
        for each in new:
            self.reasons[each] = reason if each == token_id else "parts of kept tokens"
        return True

    def add_all(self, reason: str, ids: Iterable[int]) -> None:
        for token_id in ids:
            self.add(reason, token_id)

    def by_reason(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for reason in self.reasons.values():
            found[reason] = found.get(reason, 0) + 1
        return found


def _by_count(counts: Int64, limits: Limits) -> Int64:
    order = np.argsort(-counts, kind="stable")
    order = order[counts[order] >= limits.min_count]
    total = int(counts.sum())
    if limits.coverage < 1.0 and total:
        before = np.cumsum(counts[order]) - counts[order]
        order = order[before < limits.coverage * total]
    return order


def _check_drop(closure: Closure, wanted: Wanted) -> None:
    needed: dict[int, str] = {}
    for reason, ids in closure.always.items():
        for each in ids:
            for part in closure.with_needs(each):
                needed.setdefault(part, reason)
    faults = [f"{_name(closure, i)} ({needed[i]})" for i in sorted(wanted.drop & needed.keys())]
    if faults:
        raise UsageError(f"--drop: these tokens are always kept: {_some(faults)}; leave them out")
    for token_id in sorted(wanted.keep):
        if clash := closure.with_needs(token_id) & wanted.drop:
            faults.append(f"{_name(closure, token_id)} needs {_name(closure, min(clash))}")
    if faults:
        raise UsageError(
            f"--keep and --drop contradict each other: {_some(faults)}; leave one of them out"
        )


def _check_least(closure: Closure, counts: Int64, order: Int64, limits: Limits) -> None:
    least = limits.least
    if least is None:
        least = min(_LEAST, closure.size // 8)
    chosen = sum(1 for i in order.tolist() if i not in closure.base)
    if chosen < least:
        raise UsageError(
            f"the corpus chooses {chosen} tokens besides those that are always kept, at least "
            f"{least} were expected ({int((counts > 0).sum())} different ones occur in "
            f"{int(counts.sum())} tokens); it may be too small, or in a language or format that "
            "this tokenizer has few tokens for; count more text, or lower --least"
        )


def _name(closure: Closure, token_id: int) -> str:
    return f"{closure.table.pieces.get(token_id, '(no token)')!r} (id:{token_id})"


def _some(faults: list[str]) -> str:
    more = f" and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
    return "; ".join(faults[:_SHOWN]) + more


def _listed(reasons: dict[str, int]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in reasons.items())
