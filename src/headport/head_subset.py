"""The dynamic head: logits of a few tokens, computed from their rows alone.

What a few rows cost does not grow with the vocabulary, and what comes out are the logits that the
whole head gives for these tokens, within `GatheredRows.error_bound`: both are sums of the same
products of the same numbers. That is checked on the first hidden states of each head, against the
whole head. Where rows cannot be gathered, are too many, or fail that check, which is logged as a
warning, the whole head runs and the tokens' columns are picked from it: the answer is right in any
case.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from headport.bundle import Bundle
from headport.errors import BundleError
from headport.head_parts import find_head
from headport.head_rows import GatheredRows, HeadRows

__all__ = ["HeadSubset"]

_log = logging.getLogger("headport.head")
Float32 = npt.NDArray[np.float32]
Int64 = npt.NDArray[np.int64]

# Rows are held in float32, at most four times as many bytes as the head stores.
_SMALL_SHARE = 1 / 8
_REMEMBERED_BYTES = 64 << 20

_Head = Callable[[Float32], Float32]


class HeadSubset:
    """Logits of subsets of one head's columns; remembers the rows of those it was last asked for.

    Args:
        bundle: Holds the head.
        name: The head, or the part of one.
        full_logits: All logits [N, V] of what its graph is given, [N, H].
    """

    def __init__(self, bundle: Bundle, name: str, full_logits: _Head) -> None:
        self._name = name
        self._full_logits = full_logits
        self._width = find_head(bundle.manifest, name).vocab_size
        self._rows: HeadRows | None = None
        self.whole_because = ""  # why the whole head runs, if it does whatever is asked for
        self._remembered: OrderedDict[bytes, GatheredRows] = OrderedDict()
        self._checked = False
        try:
            self._rows = HeadRows(bundle, name)
        except BundleError as error:
            self.whole_because = str(error)

    def logits(self, hidden_states: Float32, columns: Int64) -> Float32:
        """Logits [N, n] of hidden states [N, H], in the order of the columns [n].

        Args:
            hidden_states: float32 [N, H].
            columns: Columns of the head: what the bundle calls token ids, mapped or not. Any order,
                also twice the same.

        Raises:
            BundleError: If a column does not exist.
        """
        outside = columns[(columns < 0) | (columns >= self._width)]
        if len(outside):
            raise BundleError(
                f"the head has {self._width} columns, {outside[:8].tolist()} were asked for"
            )
        if self._rows is None or len(columns) > _SMALL_SHARE * self._width:
            return self._whole(hidden_states, columns)
        rows = self._gathered(columns)
        unproved = not self._checked and len(hidden_states) > 0 and len(columns) > 0
        states = self._rows.states(hidden_states)
        if unproved and not self._hold(rows, states[:1], columns):
            return self._whole(hidden_states, columns)
        return rows.logits(states)

    def _whole(self, hidden_states: Float32, columns: Int64) -> Float32:
        return np.ascontiguousarray(self._full_logits(hidden_states)[:, columns])

    def _gathered(self, columns: Int64) -> GatheredRows:
        assert self._rows is not None
        key = columns.astype(np.int64).tobytes()
        found = self._remembered.pop(key, None)
        if found is None:
            found = self._rows.gather(columns)
        self._remembered[key] = found
        while sum(rows.weight.nbytes for rows in self._remembered.values()) > _REMEMBERED_BYTES:
            if len(self._remembered) == 1:
                break
            self._remembered.popitem(last=False)
        return found

    def _hold(self, rows: GatheredRows, hidden_states: Float32, columns: Int64) -> bool:
        assert self._rows is not None
        expected = self._whole(hidden_states, columns)
        if not np.isfinite(expected).all():  # proves nothing; the next state may
            return False
        error = np.abs(rows.logits(hidden_states).astype(np.float64) - expected)
        bound = rows.error_bound(hidden_states, self._rows.activation_block)
        self._checked = bool((error <= bound).all())
        if not self._checked:
            worst = float((error / bound).max())
            self.whole_because = f"rows differ from the whole head by {worst:.3g} times the bound"
            _log.warning("%s: %s; the whole head runs instead", self._name, self.whole_because)
            self._rows = None
            self._remembered.clear()
        return self._checked
