"""Counting in rounds: whatever ends a run, it goes on behind the last round."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from headport.progress import bar
from headport.quantize.count.batches import Batch, batches_of, without_duplicates
from headport.quantize.count.corpus import Corpus
from headport.quantize.count.held_out import HeldOutFile
from headport.quantize.count.near_duplicates import SeenDocuments
from headport.quantize.count.tally import Tally, TallyFile
from headport.quantize.count.workers import BatchCount, Workers, open_workers

__all__ = ["Job"]

_SAVE_EVERY_S = 20.0


@dataclass(frozen=True)
class Job:
    """What is to be counted, and what has been."""

    source: str  # text of tokenizer.json
    corpus: Corpus
    tally: Tally  # grows
    state: TallyFile
    units: bool
    held_out: float
    held_out_file: HeldOutFile | None
    seen: SeenDocuments | None  # None: duplicates are counted
    skip_damaged: bool

    def run(self, processes: int) -> None:
        """Count the rest of the corpus; the tally is saved after each round.

        Raises:
            UsageError: If a file or a document is not usable.
        """
        totals = self.tally.totals
        place = (totals.file, totals.end)
        batches = batches_of(self.corpus, place, skip_damaged=self.skip_damaged)
        with (
            open_workers(self.source, processes, units=self.units) as workers,
            bar(None, "count", "document") as progress,
        ):
            progress.update(int(self.tally.file_documents.sum()))
            while documents := sum(self._round(batches, workers)):
                progress.update(documents)
                if self.held_out_file is not None:
                    totals.held_out_bytes = self.held_out_file.sync()
                self.state.save(self.tally)

    def _round(self, batches: Iterator[Batch], workers: Workers) -> Iterator[int]:
        """Count for a while, so that nothing is under way at its end; documents per batch."""
        some = _for_a_while(batches)
        if self.seen is not None:
            some = without_duplicates(workers, some, self.seen)
        for batch, found in workers.count(some, lambda b: b.texts, self.held_out):
            self._add(batch, found)
            yield len(batch.files)

    def _add(self, batch: Batch, found: BatchCount) -> None:
        tally = self.tally
        tally.add(found.counted, found.held_out)
        tally.totals.skipped += batch.damaged
        tally.totals.duplicates += batch.duplicates
        tally.totals.file, tally.totals.end = batch.place
        tally.file_documents += np.bincount(batch.files, minlength=len(tally.file_documents))
        if self.held_out_file is not None:
            self.held_out_file.write(batch.texts, found.is_held_out)


def _for_a_while(batches: Iterator[Any]) -> Iterator[Any]:
    end = time.monotonic() + _SAVE_EVERY_S
    for batch in batches:
        yield batch
        if time.monotonic() > end:
            return
