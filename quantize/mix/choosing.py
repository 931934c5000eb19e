"""Which groups get the smaller format: cheapest first, as many as a budget allows.

Groups are ordered by KL alone per byte saved, and a mix is the first n of that order. If what
groups cost added up, no other choice would lose less for the bytes that such a mix saves; it does
not quite add up, so mixes are measured themselves, and no sum decides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from headport.quantize.mix.groups import Group
from headport.quantize.mix.reading import Drift

__all__ = ["Budget", "GroupCost", "cheapest_first", "first_within", "longest_within"]


@dataclass(frozen=True)
class GroupCost:
    """What one group saves, and costs by itself."""

    group: Group
    bytes_small: int  # of its matrices in the smaller format
    bytes_large: int  # and in the larger one
    alone: Drift  # with this group in the smaller format and everything else as it is

    @property
    def bytes_saved(self) -> int:
        """By the smaller format."""
        return self.bytes_large - self.bytes_small

    @property
    def price(self) -> float:
        """Nats of mean KL for each byte saved."""
        return self.alone.kl_mean / self.bytes_saved


@dataclass(frozen=True)
class Budget:
    """What a mix may cost, at most."""

    of: Literal["kl", "ppl", "bytes"]
    limit: float  # nats of mean KL; perplexity ratio; bytes of all matrices

    def spent(self, drift: Drift, nbytes: int) -> float:
        """What a mix with this drift and these bytes spends of it, in the limit's unit."""
        return {
            "kl": drift.kl_mean,
            "ppl": drift.perplexity_ratio,
            "bytes": float(nbytes),
        }[self.of]


def cheapest_first(costs: Sequence[GroupCost]) -> list[GroupCost]:
    """By price; equal ones in their own order."""
    return sorted(costs, key=lambda cost: cost.price)


def longest_within(count: int, within: Callable[[int], bool]) -> int | None:
    """The largest n of 0…count that is within a budget, by bisection; None if 0 is not.

    Args:
        count: Tried first.
        within: Whether the first n groups are; taken to hold for every n below one that it holds
            for.
    """
    if within(count):
        return count
    low, high = -1, count
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if within(middle) else (low, middle)
    return None if low < 0 else low


def first_within(count: int, within: Callable[[int], bool]) -> int | None:
    """The smallest n of 0…count that is within a budget; None if there is none."""
    return next((n for n in range(count + 1) if within(n)), None)
