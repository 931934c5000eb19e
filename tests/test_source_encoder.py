"""What rows of a cache read beside their tokens."""

from __future__ import annotations

import numpy as np
import pytest

from headport.errors import BundleError
from headport.source_encoder import Encoded, RowSources

NAME = "cross_key_values.0.key"


def encoded(length: int, value: float = 1.0) -> Encoded:
    return Encoded({NAME: np.full((1, 2, length, 4), value, np.float32)}, length)


def test_a_decoder_only_bundle_reads_nothing():
    rows = RowSources((), 3)
    assert rows.feeds(range(3)) == {}
    assert rows.feeds([0]) is rows.feeds([1, 2])


def test_rows_of_one_source_share_its_arrays():
    rows, source = RowSources((NAME,), 4), encoded(3)
    rows.fill(source)
    feeds = rows.feeds(range(4))
    assert feeds[NAME] is source.arrays[NAME]
    assert feeds["source_mask"].tolist() == [[1, 1, 1]]
    rows.reorder([3, 3, 0, 1])
    assert rows.feeds(range(4)) is feeds


def test_rows_of_several_sources_are_padded_to_the_longest():
    rows = RowSources((NAME,), 3)
    rows.put(0, encoded(2, 5.0))
    rows.put(2, encoded(4, 7.0))
    feeds = rows.feeds([0, 1, 2])
    assert feeds["source_mask"].tolist() == [[1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]]
    assert feeds[NAME].shape == (3, 2, 4, 4)
    assert feeds[NAME][:, 0, :, 0].tolist() == [[5, 5, 0, 0], [0, 0, 0, 0], [7, 7, 7, 7]]


def test_what_was_joined_is_kept_until_something_changes():
    rows = RowSources((NAME,), 2)
    rows.put(0, encoded(2))
    rows.put(1, encoded(3))
    first = rows.feeds([0, 1])
    assert rows.feeds([0, 1]) is first
    assert rows.feeds([1]) is not first  # a row alone reads its source as it is
    assert rows.feeds([0, 1]) is first
    rows.put(1, encoded(3))
    assert rows.feeds([0, 1]) is not first


def test_a_copied_row_reads_what_its_model_read():
    rows, source = RowSources((NAME,), 2), encoded(2)
    rows.put(1, source)
    rows.copy(1, 0)
    rows.put(1, None)
    assert rows.feeds([0])[NAME] is source.arrays[NAME]


def test_rows_without_a_source_cannot_go_on():
    rows = RowSources((NAME,), 2)
    with pytest.raises(BundleError, match="without a source"):
        rows.feeds([0, 1])
