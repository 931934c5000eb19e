from __future__ import annotations

import gzip
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from tokenizers import Tokenizer

from headport.cli import main
from headport.errors import OutputError, ParityError, UsageError
from headport.quantize.count import batches, command, job, near_duplicates, units
from headport.quantize.count.command import Options, count
from headport.quantize.count.held_out import held_out
from headport.quantize.count.table import read_counts
from tests.quantize.count.tokenizers_of import LINES, byte_level, split_by


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    byte_level().save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    monkeypatch.setattr(batches, "_BATCH_CHARACTERS", 500)
    monkeypatch.setattr(near_duplicates, "_FILTER_BITS", 1 << 20)


def documents(size: int = 120) -> list[str]:
    return [f"document {n}: {LINES[n % 4]}" * (1 + n % 3) for n in range(size)]


def write_corpus(folder: Path, texts: list[str]) -> tuple[str, ...]:
    third = len(texts) // 3
    parts = (texts[:third], texts[third:])
    names = ("a.jsonl", "b.jsonl.gz")
    for name, part in zip(names, parts, strict=True):
        data = "".join(json.dumps({"text": t}) + "\n" for t in part).encode()
        (folder / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    return tuple(str(folder / name) for name in names)


def expected(model: Path, texts: list[str]) -> list[int]:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    ids = [i for t in texts for i in tokenizer.encode(t, add_special_tokens=False).ids]
    return np.bincount(ids, minlength=tokenizer.get_vocab_size()).tolist()


@pytest.mark.parametrize("processes", [1, 2])
def test_counts_are_those_of_the_tokenizer(model, tmp_path, processes):
    output = tmp_path / "counts.parquet"
    corpus = write_corpus(tmp_path, documents())
    options = Options(model=model, corpus=corpus, output=output, processes=processes)
    found = count(options)
    assert found.counts.tolist() == expected(model, documents())
    assert read_counts(output).counts.tolist() == found.counts.tolist()
    record = found.record
    assert record.method == "units" and record.documents == 120
    assert [(f.name, f.documents) for f in record.files] == [("a.jsonl", 40), ("b.jsonl.gz", 80)]
    assert record.bytes == sum(len(t.encode()) for t in documents())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.jsonl", "b.jsonl.gz", output.name]


def test_a_held_out_part_is_counted_apart_and_written(model, tmp_path):
    texts = documents()
    held = tmp_path / "held.jsonl"
    options = Options(
        model=model,
        corpus=write_corpus(tmp_path, texts),
        output=tmp_path / "counts.parquet",
        held_out=0.3,
        held_out_text=held,
        processes=1,
    )
    found = count(options)
    written = [json.loads(line)["text"] for line in held.read_text().splitlines()]
    assert written == [t for t, aside in zip(texts, held_out(texts, 0.3), strict=True) if aside]
    kept = [t for t in texts if t not in written]
    assert 15 < len(written) < 60 and found.counts.tolist() == expected(model, kept)
    record = found.record.held_out
    assert record is not None and "blake2b" in record.rule and record.share == 0.3
    assert record.documents == len(written)
    assert record.tokens == sum(expected(model, written))
    unseen = [n for n, c in zip(expected(model, written), found.counts, strict=True) if not c]
    assert record.unseen_tokens == sum(unseen)
    assert record.unseen_ids == np.count_nonzero(unseen)


def test_near_duplicates_count_once(model, tmp_path):
    # Texts of their own kind: those of `documents` share most of their words.
    texts = [" ".join(f"{w * 7919 + n}" for w in range(60)) for n in range(0, 90_000, 9_000)]
    corpus = write_corpus(tmp_path, [*texts, *texts[:4], texts[5].upper()])
    for processes in (1, 2):
        output = tmp_path / f"{processes}.parquet"
        options = Options(
            model=model, corpus=corpus, output=output, deduplicate=True, processes=processes
        )
        found = count(options)
        assert found.counts.tolist() == expected(model, texts)
        assert found.record.deduplication is not None
        assert found.record.deduplication.documents == 5


class StoppedError(Exception):
    pass


@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_that_was_stopped_goes_on_and_counts_the_same(
    model, tmp_path, monkeypatch, processes
):
    texts = documents()
    corpus = write_corpus(tmp_path, texts)
    held = tmp_path / "held.jsonl"
    options = Options(
        model=model,
        corpus=corpus,
        output=tmp_path / "counts.parquet",
        held_out=0.3,
        held_out_text=held,
        deduplicate=True,
        processes=processes,
    )
    whole = count(options)
    text = held.read_text()
    held.unlink()
    options.output.unlink()
    monkeypatch.setattr(job, "_SAVE_EVERY_S", 0.0)  # a round is one batch
    add, added = job.Job._add, []

    def stop(self, batch, found):
        add(self, batch, found)
        added.append(len(batch.files))
        if len(added) in (3, 7):
            raise StoppedError

    monkeypatch.setattr(job.Job, "_add", stop)
    for _ in range(2):  # what came after the last save is counted again
        with pytest.raises(StoppedError):
            count(options)
    again = count(options)
    assert sum(added) > 120
    assert again.counts.tolist() == whole.counts.tolist()
    assert again.record == whole.record
    assert held.read_text() == text
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_an_unfinished_count_of_something_else_is_refused(model, tmp_path, monkeypatch):
    corpus = write_corpus(tmp_path, documents())
    options = Options(model=model, corpus=corpus, output=tmp_path / "c.parquet", processes=1)
    monkeypatch.setattr(job, "_SAVE_EVERY_S", 0.0)
    add = job.Job._add

    def stop(self, batch, found):
        add(self, batch, found)
        if batch.place[0] == 1:
            raise StoppedError

    monkeypatch.setattr(job.Job, "_add", stop)
    with pytest.raises(StoppedError):
        count(options)
    monkeypatch.setattr(job.Job, "_add", add)
    other = msgspec.structs.replace(options, held_out=0.5, deduplicate=True, plain=True)
    with pytest.raises(UsageError, match="with other deduplicate, held_out, plain found; pass"):
        count(other)
    state = tmp_path / ".c.parquet.unfinished"
    data = state.read_bytes()
    state.write_bytes(data[: len(data) // 2])
    with pytest.raises(UsageError, match=r"cannot be read .*pass --force"):
        count(options)
    found = count(msgspec.structs.replace(options, force=True))
    assert found.counts.tolist() == expected(model, documents())


def test_a_part_of_the_held_out_texts_that_is_gone_is_written_anew_when_told_to(
    model, tmp_path, monkeypatch
):
    held = tmp_path / "held.jsonl"
    options = Options(
        model=model,
        corpus=write_corpus(tmp_path, documents()),
        output=tmp_path / "c.parquet",
        held_out=0.3,
        held_out_text=held,
        processes=1,
    )
    whole = count(options)
    text = held.read_text()
    held.unlink()
    options.output.unlink()
    with monkeypatch.context() as patched:
        patched.setattr(job, "_SAVE_EVERY_S", 0.0)
        add = job.Job._add

        def stop(self, batch, found):
            add(self, batch, found)
            if batch.place[0] == 1:
                raise StoppedError

        patched.setattr(job.Job, "_add", stop)
        with pytest.raises(StoppedError):
            count(options)
    (tmp_path / ".held.jsonl.unfinished").unlink()
    with pytest.raises(UsageError, match=r"bytes of an unfinished count .* 0 found; pass --force"):
        count(options)
    again = count(msgspec.structs.replace(options, force=True))
    assert again.counts.tolist() == whole.counts.tolist() and held.read_text() == text


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="needs POSIX signals")
def test_a_killed_process_leaves_no_worker_and_goes_on(model, tmp_path):
    texts = documents(3000)
    corpus = write_corpus(tmp_path, texts)
    output = tmp_path / "counts.parquet"
    code = (
        "import sys\n"
        "from headport.cli import main\n"
        "from headport.quantize.count import batches, job\n"
        "batches._BATCH_CHARACTERS, job._SAVE_EVERY_S = 2000, 0.0\n"
        "if __name__ == '__main__':\n"
        "    sys.exit(main(sys.argv[1:]))\n"
    )
    script = tmp_path / "slow.py"
    script.write_text(code)
    argv = ["count", str(model), "--corpus", *corpus, "-o", str(output), "--processes", "2"]
    process = subprocess.Popen([sys.executable, str(script), *argv], start_new_session=True)
    state = tmp_path / ".counts.parquet.unfinished"
    end = time.monotonic() + 60
    while not state.exists() and time.monotonic() < end and process.poll() is None:
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)  # the parent alone
    process.wait()
    assert state.exists() and not output.exists()
    with pytest.raises(ProcessLookupError):  # its workers end by themselves
        while time.monotonic() < end:
            os.killpg(process.pid, 0)
            time.sleep(0.05)
    assert main([*argv, "--quiet"]) == 0
    assert read_counts(output).counts.tolist() == expected(model, texts)


def test_a_damaged_document_is_refused_or_left_out_by_name(model, tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"text": "one"}\n{"body": "two"}\n{"text": "three"}\n')
    options = Options(model=model, corpus=(str(file),), output=tmp_path / "c.parquet", processes=1)
    with pytest.raises(UsageError, match=r"a\.jsonl: a damaged document before 32 .*--skip-damage"):
        count(options)
    found = count(msgspec.structs.replace(options, skip_damaged=True))
    assert found.counts.tolist() == expected(model, ["one", "three"])
    assert found.record.skipped_documents == 1 and found.record.documents == 2


def test_other_units_are_noticed_before_anything_is_counted(model, tmp_path, monkeypatch):
    wrong = replace(units._OF_GPT2, units=re.compile(r"[^e]+|e+"))
    monkeypatch.setattr(units, "_OF_GPT2", wrong)
    options = Options(
        model=model,
        corpus=write_corpus(tmp_path, documents()),
        output=tmp_path / "c.parquet",
        processes=1,
    )
    with pytest.raises(ParityError, match="pass --plain"):
        count(options)
    plain = count(msgspec.structs.replace(options, plain=True))
    assert plain.counts.tolist() == expected(model, documents())
    assert (plain.record.method, plain.record.method_reason) == ("plain", "it was asked for")


def test_a_tokenizer_without_known_cuts_is_counted_plainly_and_said(tmp_path, capsys):
    split_by(r"\s+").save(str(tmp_path / "tokenizer.json"))
    [first, _] = write_corpus(tmp_path, documents())
    output = tmp_path / "c.parquet"
    assert main(["count", str(tmp_path), "--corpus", first, "-o", str(output)]) == 0
    text = capsys.readouterr().out
    assert "document by document: its pre-tokenizer is not one whose cuts are known" in text
    assert read_counts(output).counts.tolist() == expected(tmp_path, documents()[:40])


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"held_out": 1.0}, UsageError, "--held-out: 0 or more, less than 1 expected, 1.0 given"),
        ({"processes": -1}, UsageError, "--processes: 0 or more expected, -1 given"),
        ({"held_out_text": Path("h.jsonl")}, UsageError, "say how much with --held-out"),
        (
            {"held_out_text": Path("h.txt"), "held_out": 0.1},
            UsageError,
            r"a \.jsonl file expected, h\.txt given",
        ),
        ({"corpus": ("nowhere",)}, UsageError, "none found for nowhere; check the path"),
        ({"model": Path("model.gguf")}, UsageError, r"a \.gguf file found; export the checkpoint"),
        ({"field": "body"}, UsageError, "damaged document"),
    ],
)
def test_wrong_use_is_refused(model, tmp_path, changes, error, message):
    options = Options(
        model=model,
        corpus=write_corpus(tmp_path, documents()),
        output=tmp_path / "c.parquet",
        processes=1,
    )
    with pytest.raises(error, match=message):
        count(msgspec.structs.replace(options, **changes))


def test_an_empty_corpus_and_an_existing_table_are_refused(model, tmp_path):
    empty = tmp_path / "a.txt"
    empty.write_text("")
    output = tmp_path / "c.parquet"
    options = Options(model=model, corpus=(str(empty),), output=output, processes=1)
    with pytest.raises(UsageError, match=r"a document with a token was expected.* give more text"):
        count(options)
    output.write_text("kept")
    with pytest.raises(OutputError, match="--force"):
        count(options)
    assert output.read_text() == "kept"


def test_a_damaged_tokenizer_is_refused(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "a.txt").write_text("text")
    options = Options(
        model=tmp_path, corpus=(str(tmp_path / "a.txt"),), output=tmp_path / "c.parquet"
    )
    with pytest.raises(UsageError, match=r"no usable tokenizer .*take the one of the checkpoint"):
        count(options)
    assert command.SUMMARY
