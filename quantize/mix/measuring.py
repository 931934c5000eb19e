"""Measuring every group alone, and mixes as a whole, until a budget is used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from headport.bundle import Bundle
from headport.errors import QuantizeError, UsageError
from headport.manifest import StoredMatrix
from headport.progress import track
from headport.quantize.backbone_plan import stored_text
from headport.quantize.mix.choosing import (
    Budget,
    GroupCost,
    cheapest_first,
    first_within,
    longest_within,
)
from headport.quantize.mix.groups import Group, find_groups
from headport.quantize.mix.reading import Drift, Reader
from headport.quantize.mix.report import MixFigures
from headport.quantize.mix.rounding import RoundedMatrices
from headport.quantize.states import read_ids, text_windows
from headport.session import SessionSettings

__all__ = ["Bench", "Choice", "choose"]

Int64 = npt.NDArray[np.int64]
Formats = tuple[StoredMatrix, StoredMatrix | None]
Texts = tuple[Sequence[Path], Sequence[Path]]


@dataclass(frozen=True)
class Choice:
    """The mix that was chosen, and what it was chosen from."""

    costs: tuple[GroupCost, ...]  # cheapest first; a mix has the first n in the smaller format
    chosen: MixFigures
    all_small: MixFigures
    all_large: MixFigures
    sum_of_parts: float  # nats
    held_out_mixes: int  # measured on the held-out text before this one was chosen
    met: bool


class Bench:
    """A bundle, its matrices in two formats, and two texts as the bundle reads them.

    Args:
        source: Portable float32 bundle.
        texts: To measure on, and held out; without the latter the second half of the former is.
        formats: The smaller and the larger one.
        tokens: At most this many of either text, shared out evenly among its files.
        parts: Groups that the layers of a kind make.
        folder: An empty folder.
        settings: Session settings.

    Raises:
        UsageError: If a text cannot be read or is too short, or the first format is not smaller.
        QuantizeError: If there is no matrix, or a format cannot hold one.
        ParityError: If the measurement itself differs from the bundle.
    """

    def __init__(
        self,
        source: Bundle,
        texts: Texts,
        formats: Formats,
        *,
        tokens: int,
        parts: int,
        folder: Path,
        settings: SessionSettings,
    ) -> None:
        windows = _windows(source, texts, tokens)
        self.formats = formats
        self._reader = Reader(source, folder, settings)
        if not self._reader.matrices:
            raise QuantizeError(
                f"{source.path}: its backbone has no matrix that products alone read"
            )
        (folder / "rounded").mkdir()
        self._rounded = RoundedMatrices(self._reader.matrices, formats, folder / "rounded")
        self.groups = find_groups(self._rounded.names, parts)
        for group in self.groups:
            self._check_smaller(group)
        self._text, self._held_out = (self._reader.read(each) for each in windows)
        self.own = self._reader.check(self._rounded.originals, self._text)
        self._known: dict[tuple[int, bool], Drift] = {}

    def _check_smaller(self, group: Group) -> None:
        small, large = (self._bytes(group, how) for how in self.formats)
        if small >= large:
            first, second = map(stored_text, self.formats)
            raise UsageError(
                f"--formats {first} {second}: the first takes {small:,} bytes for {group.label}, "
                f"the second {large:,}; the smaller one was expected first"
            )

    def _bytes(self, group: Group, how: StoredMatrix | None) -> int:
        return sum(self._rounded.nbytes(name, how) for name in group.names)

    def costs(self) -> list[GroupCost]:
        """What every group saves and costs by itself, cheapest first."""
        small, large = self.formats
        return cheapest_first(
            [
                GroupCost(
                    group,
                    self._bytes(group, small),
                    self._bytes(group, large),
                    self._reader.drift(
                        self._rounded.weights(dict.fromkeys(group.names, small)), self._text
                    ),
                )
                for group in track(self.groups, "groups alone", unit="group")
            ]
        )

    def drift(self, costs: Sequence[GroupCost], count: int, *, held_out: bool) -> Drift:
        """The mix with the first `count` groups in the smaller format, measured once per text."""
        if (count, held_out) not in self._known:
            plan = {
                name: self.formats[0] if place < count else self.formats[1]
                for place, cost in enumerate(costs)
                for name in cost.group.names
            }
            reading = self._held_out if held_out else self._text
            found = self._reader.drift(self._rounded.weights(plan), reading)
            self._known[count, held_out] = found
        return self._known[count, held_out]

    @property
    def held_out_mixes(self) -> int:
        """Mixes measured on the held-out text so far."""
        return sum(held_out for _, held_out in self._known)


def choose(bench: Bench, budget: Budget) -> Choice:
    """Measure groups, then mixes, and take the one that uses the budget best on both texts."""
    costs = bench.costs()
    count = len(costs)

    def nbytes(n: int) -> int:
        return sum(
            cost.bytes_small if place < n else cost.bytes_large for place, cost in enumerate(costs)
        )

    def within(n: int, *, held_out: bool) -> bool:
        drift = bench.drift(costs, n, held_out=held_out)
        return budget.spent(drift, nbytes(n)) <= budget.limit

    if budget.of == "bytes":
        found = first_within(count, lambda n: nbytes(n) <= budget.limit)
        n = count if found is None else found
    else:
        found = longest_within(count, partial(within, held_out=False))
        if found is not None:
            found = longest_within(found, partial(within, held_out=True))
        n = found or 0
    looked = bench.held_out_mixes

    def figures(n: int) -> MixFigures:
        drifts = (bench.drift(costs, n, held_out=held_out) for held_out in (False, True))
        return MixFigures(n, nbytes(n), *drifts)

    all_large = figures(0)
    parts = [all_large.text.kl_mean, *(cost.alone.kl_mean for cost in costs[:n])]
    return Choice(
        costs=tuple(costs),
        chosen=figures(n),
        all_small=figures(count),
        all_large=all_large,
        sum_of_parts=float(sum(parts)),
        held_out_mixes=looked,
        met=found is not None,
    )


def _windows(source: Bundle, texts: Texts, tokens: int) -> tuple[list[Int64], list[Int64]]:
    """Of the text to measure on, and of the one held out."""
    first, others = texts
    if others:
        return (
            [w for ids in read_ids(source, first, tokens) for w in text_windows(ids)],
            [w for ids in read_ids(source, others, tokens) for w in text_windows(ids)],
        )
    halves: tuple[list[Int64], list[Int64]] = ([], [])
    for file, ids in zip(first, read_ids(source, first, 2 * tokens), strict=True):
        middle = len(ids) // 2
        if middle < 2:
            raise UsageError(
                f"{file}: text of four tokens or more was expected, to hold half of it out, "
                f"{len(ids)} found; give more, or --held-out"
            )
        for half, part in zip(halves, (ids[:middle], ids[middle:]), strict=True):
            half.extend(text_windows(part))
    return halves
