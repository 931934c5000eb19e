"""What was measured of all candidates, and which one it speaks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

import msgspec

from headport.runtime.tuning.candidates import Candidate

__all__ = ["Measured", "Row", "choose", "rows_of"]


class Measured(msgspec.Struct, frozen=True):
    """One run of one candidate, in a process of its own."""

    decode_ms: float  # a step by one token, the median of all steps
    prompt_ms: float  # from the request to its first token
    answers: str  # sha256 of hidden states, head outputs and tokens


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """All runs of one candidate.

    Ratios are to the last candidate in the same round, so that what the machine did meanwhile meets
    both; below 1 is faster. All are medians over rounds.
    """

    threads: int
    spinning: bool
    decode_ms: float
    decode_least_ms: float  # of any round
    decode_most_ms: float
    decode_ratio: float
    prompt_ms: float
    prompt_ratio: float

    @property
    def candidate(self) -> Candidate:
        """What was run."""
        return Candidate(self.threads, self.spinning)


def rows_of(rounds: Sequence[Mapping[Candidate, Measured]]) -> tuple[Row, ...]:
    """One row per candidate, in their order.

    Args:
        rounds: What each round measured of every candidate; at least one round.
    """
    last = max(rounds[0])
    rows = []
    for candidate in sorted(rounds[0]):
        decode = [found[candidate].decode_ms for found in rounds]
        row = Row(
            threads=candidate.threads,
            spinning=candidate.spinning,
            decode_ms=median(decode),
            decode_least_ms=min(decode),
            decode_most_ms=max(decode),
            decode_ratio=median(f[candidate].decode_ms / f[last].decode_ms for f in rounds),
            prompt_ms=median(f[candidate].prompt_ms for f in rounds),
            prompt_ratio=median(f[candidate].prompt_ms / f[last].prompt_ms for f in rounds),
        )
        rows.append(row)
    return tuple(rows)


def choose(rows: Sequence[Row], margin: float) -> Row:
    """The fastest decoder, or the one with fewest threads, and asleep, among those as fast.

    As fast is one whose steps and whose prompts both take at most `margin` longer than those of the
    fastest decoder: what saves threads must not be paid for by prompts.

    Args:
        rows: Of all candidates.
        margin: Share of the fastest's time that counts as noise.
    """
    fastest = min(rows, key=lambda row: row.decode_ratio)
    most = 1.0 + margin
    as_fast = (
        row
        for row in rows
        if row.decode_ratio <= most * fastest.decode_ratio
        and row.prompt_ratio <= most * fastest.prompt_ratio
    )
    return min(as_fast, key=lambda row: row.candidate)
