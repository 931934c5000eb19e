"""A bundle of headport: `bundle.py FOLDER THREADS`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from loop import serve

from headport.bundle import Bundle
from headport.runner import Cache, open_runner
from headport.session import SessionSettings
from headport.vocabulary_map import read_map

_CHUNK = 512


class Model:
    """Backbone and head, the head for the last token only."""

    def __init__(self, folder: str, threads: int) -> None:
        bundle = Bundle.open(Path(folder))
        kept = read_map(bundle)
        self.kept_ids: list[int] | None = None if kept is None else kept.tolist()
        self._runner = open_runner(bundle, SessionSettings(threads=threads))
        self._cache: Cache | None = None

    def reset(self, capacity: int) -> None:
        """See `loop.Model`."""
        self._cache = self._runner.new_cache(1, capacity)

    def feed(self, token_ids: Sequence[int]) -> np.ndarray[Any, Any]:
        """See `loop.Model`."""
        assert self._cache is not None
        for start in range(0, len(token_ids), _CHUNK):
            ids = np.array([token_ids[start : start + _CHUNK]], np.int64)
            hidden = self._runner.forward(self._cache, ids, np.array([ids.shape[1]]))
        output = self._runner.head(hidden[:, -1])
        logits = output.logits
        if logits is None:  # candidates say which tokens are best, not all logits
            logits = self._runner.full_logits(hidden[:, -1])
        return logits[0]


if __name__ == "__main__":
    serve(lambda: Model(sys.argv[1], int(sys.argv[2])))
