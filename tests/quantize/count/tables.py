"""Tables of counts for tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from headport.quantize.count.table import SCHEMA_VERSION, CountsRecord, TokenCounts


def token_counts(values: Mapping[int, int], size: int, **changes: Any) -> TokenCounts:
    """A table with these counts by id."""
    counts = np.zeros(size, np.int64)
    for token_id, count in values.items():
        counts[token_id] = count
    record = CountsRecord(
        schema_version=SCHEMA_VERSION,
        tokenizer_sha256="0" * 64,
        vocab_size=size,
        documents=1,
        tokens=int(counts.sum()),
        bytes=1,
        files=(),
        method="plain",
        method_reason="a test",
        held_out=None,
        deduplication=None,
        skipped_documents=0,
    )
    return TokenCounts(counts, msgspec.structs.replace(record, **changes))
