from __future__ import annotations

import builtins

import msgspec
import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from headport.errors import OutputError, UsageError
from headport.quantize.count.table import read_counts, write_counts
from tests.quantize.count.tables import token_counts


def test_a_table_is_what_was_written(tmp_path):
    file = tmp_path / "counts.parquet"
    written = token_counts({3: 5, 0: 1 << 40}, 7)
    write_counts(file, written, force=False)
    found = read_counts(file)
    assert found.counts.tolist() == [1 << 40, 0, 0, 5, 0, 0, 0]
    assert found.record == written.record
    assert [p.name for p in tmp_path.iterdir()] == ["counts.parquet"]


def test_the_format_is_the_agreed_one(tmp_path):
    file = tmp_path / "counts.parquet"
    write_counts(file, token_counts({2: 4, 5: 1}, 7), force=False)
    table = parquet.read_table(file)
    assert table.schema.field("token_id").type == pyarrow.int32()
    assert table.schema.field("count").type == pyarrow.int64()
    assert table.to_pydict() == {"token_id": [2, 5], "count": [4, 1]}
    record = msgspec.json.decode(table.schema.metadata[b"headport"])
    assert {"tokenizer_sha256", "vocab_size", "documents", "tokens", "files", "held_out"} <= set(
        record
    )


def test_an_existing_table_is_kept_unless_forced(tmp_path):
    file = tmp_path / "counts.parquet"
    write_counts(file, token_counts({0: 1}, 2), force=False)
    with pytest.raises(OutputError, match="--force"):
        write_counts(file, token_counts({1: 9}, 2), force=False)
    assert read_counts(file).counts.tolist() == [1, 0]
    write_counts(file, token_counts({1: 9}, 2), force=True)
    assert read_counts(file).counts.tolist() == [0, 9]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 4}, r"ids below 4 expected, \[5\] found"),
        ({"tokens": 6}, "6 tokens expected by its record, the rows add up to 5"),
        ({"schema_version": 2}, "schema version 1 expected, 2 found; count again"),
    ],
)
def test_a_table_that_contradicts_itself_is_refused(tmp_path, changes, message):
    file = tmp_path / "counts.parquet"
    write_counts(file, token_counts({5: 5}, 7, **changes), force=False)
    with pytest.raises(UsageError, match=message):
        read_counts(file)


def test_what_is_no_table_of_counts_is_refused(tmp_path):
    with pytest.raises(UsageError, match="none is there"):
        read_counts(tmp_path / "absent.parquet")
    text = tmp_path / "text.parquet"
    text.write_text("hello")
    with pytest.raises(UsageError, match="not a Parquet file"):
        read_counts(text)
    other = tmp_path / "other.parquet"
    parquet.write_table(pyarrow.table({"text": ["a"]}), other)
    with pytest.raises(UsageError, match="columns text found; make it with `headport count`"):
        read_counts(other)


def test_twice_the_same_id_is_refused(tmp_path):
    file, twice = tmp_path / "counts.parquet", tmp_path / "twice.parquet"
    write_counts(file, token_counts({5: 4}, 7), force=False)
    schema = parquet.read_table(file).schema
    columns = [pyarrow.array(np.array(v, t)) for v, t in (([5, 5], "i4"), ([2, 2], "i8"))]
    parquet.write_table(pyarrow.Table.from_arrays(columns, schema=schema), twice)
    with pytest.raises(UsageError, match="one row with a count of 1 or more per id"):
        read_counts(twice)


def test_without_pyarrow_the_message_names_the_extra(tmp_path, monkeypatch):
    load = builtins.__import__

    def refuse(name, *rest):
        if name.startswith("pyarrow"):
            raise ImportError(name)
        return load(name, *rest)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(UsageError, match=r"pip install 'headport\[prune\]'"):
        read_counts(tmp_path / "counts.parquet")
