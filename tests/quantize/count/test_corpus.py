from __future__ import annotations

import gzip
import json
import lzma

import pyarrow
import pytest
from pyarrow import parquet

from headport.errors import UsageError
from headport.quantize.count import batches, corpus
from headport.quantize.count.batches import batches_of
from headport.quantize.count.corpus import Corpus, find_files

TEXT = "".join(f"line {n} of a text that is cut\n" + "\n" * (n % 3 == 0) for n in range(2000))
RECORDS = [{"text": f"record {n}\nwith two lines", "other": n} for n in range(50)]


def zstd(data: bytes) -> bytes:
    half = len(data) // 2  # two frames, as tools that append write them
    return b"".join(
        bytes(pyarrow.compress(part, codec="zstd", asbytes=True))
        for part in (data[:half], data[half:])
    )


PACKED = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress, ".zst": zstd}


def texts(files, field="text", file=0, start=0):
    return [d.text for d in Corpus(files, field).documents(file, start)]


@pytest.mark.parametrize("suffix", PACKED)
def test_every_packing_gives_the_same_documents(tmp_path, suffix):
    plain = tmp_path / f"a.txt{suffix}"
    plain.write_bytes(PACKED[suffix](TEXT.encode()))
    lines = tmp_path / f"b.jsonl{suffix}"
    lines.write_bytes(PACKED[suffix]("".join(json.dumps(r) + "\n" for r in RECORDS).encode()))
    found = texts([plain])
    assert "".join(found) == TEXT and len(found) > 10
    assert all(len(t.encode()) >= corpus.TEXT_BYTES for t in found[:-1])
    assert texts([lines]) == [r["text"] for r in RECORDS]


def test_columns_of_parquet_are_read(tmp_path):
    file = tmp_path / "c.parquet"
    table = pyarrow.table({"body": [r["text"] for r in RECORDS], "n": list(range(50))})
    parquet.write_table(table, file, row_group_size=20)
    assert texts([file], "body") == [r["text"] for r in RECORDS]
    assert texts([file], "body", start=33) == [r["text"] for r in RECORDS[33:]]
    with pytest.raises(
        UsageError, match="a column 'text' was expected, found body, n; name one with"
    ):
        texts([file])
    assert [d.fault for d in Corpus([file], "n").documents()][:1] == ["a text was expected"]


def test_a_batch_of_damaged_documents_is_bounded_too(tmp_path, monkeypatch):
    monkeypatch.setattr(batches, "_BATCH_DOCUMENTS", 4)
    file = tmp_path / "damaged.jsonl"
    file.write_text("{\n" * 10 + json.dumps(RECORDS[0]) + "\n")
    found = list(batches_of(Corpus([file]), (0, 0), skip_damaged=True))
    assert [(batch.damaged, len(batch.texts)) for batch in found] == [(4, 0), (4, 0), (2, 1)]
    assert [batch.place for batch in found] == [(0, 8), (0, 16), (0, file.stat().st_size)]


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_a_stream_is_taken_up_at_any_document(tmp_path, suffix, monkeypatch):
    monkeypatch.setattr(corpus, "_CHUNK_BYTES", 1000)
    monkeypatch.setattr(corpus, "_LONGEST_BYTES", 9000)
    one, two = tmp_path / f"a.txt{suffix}", tmp_path / f"b.jsonl{suffix}"
    one.write_bytes(PACKED[suffix](TEXT.encode()))
    two.write_bytes(PACKED[suffix]("".join(json.dumps(r) + "\n" for r in RECORDS).encode()))
    found = list(Corpus([one, two]).documents())
    for at in (0, 1, 7, len(found) - 60, len(found) - 50, len(found) - 2):
        rest = Corpus([one, two]).documents(found[at].file, found[at].end)
        assert list(rest) == found[at + 1 :]


def test_how_much_is_read_at_once_changes_no_document(tmp_path, monkeypatch):
    file = tmp_path / "a.txt"
    long_line = "ä中🙂" * 3000
    file.write_text(TEXT + long_line + " and " + long_line + TEXT, encoding="utf-8")
    monkeypatch.setattr(corpus, "_LONGEST_BYTES", 8192)
    found = []
    for size in (100, 4096, 1 << 20):
        monkeypatch.setattr(corpus, "_CHUNK_BYTES", size)
        found.append(texts([file]))
    assert found[0] == found[1] == found[2]
    assert "".join(found[0]) == file.read_text(encoding="utf-8")
    assert max(len(t.encode()) for t in found[0]) <= 8192


def test_damaged_documents_are_told_apart(tmp_path):
    lines, text = tmp_path / "a.jsonl", tmp_path / "b.txt"
    lines.write_bytes(b'{"text": "a"}\n\n{"other": 1}\nnot JSON\n{"text": 5}\n{"text": "b"}\n')
    found = list(Corpus([lines]).documents())
    assert [d.text for d in found] == ["a", None, None, None, "b"]
    assert "text" in found[1].fault
    text.write_bytes(b"a\xffb")
    [damaged] = Corpus([text]).documents()
    assert damaged.text is None and "UTF-8 was expected" in damaged.fault


def test_a_file_cut_short_is_refused_with_its_place(tmp_path):
    packed = tmp_path / "a.txt.gz"
    packed.write_bytes(gzip.compress(TEXT.encode() * 20)[:-200])
    with pytest.raises(UsageError, match=r"a\.txt\.gz: cannot be read behind \d+.*; mend it"):
        texts([packed])
    with pytest.raises(UsageError, match="shorter than when counting began"):
        packed.write_bytes(gzip.compress(b"abc"))
        texts([packed], start=10)
    odd = tmp_path / "a.parquet.gz"
    odd.write_bytes(b"")
    with pytest.raises(UsageError, match="Parquet compresses itself"):
        texts([odd])


def test_files_come_from_paths_folders_and_patterns(tmp_path):
    for name in ("b.txt", "a.txt", "sub/c.txt", "sub/.hidden/d.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text("x")
    a, b, c = tmp_path / "a.txt", tmp_path / "b.txt", tmp_path / "sub" / "c.txt"
    assert find_files([str(b), str(tmp_path / "*.txt")]) == (b, a)
    assert find_files([str(tmp_path)]) == (a, b, c)
    assert find_files([str(tmp_path / "**" / "c.txt")]) == (c,)
    with pytest.raises(UsageError, match=r"none found for .*no1.*, .*no\*2"):
        find_files([str(a), str(tmp_path / "no1"), str(tmp_path / "no*2")])
