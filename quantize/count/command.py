"""`headport count`: how often a corpus uses each token."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from headport import __version__
from headport.bundle import check_writable
from headport.command import OptionRecord, Outcome, option, positional
from headport.errors import OutputError, ParityError, UsageError
from headport.machine import usable_cpus
from headport.progress import say
from headport.quantize.count.corpus import Corpus, find_files
from headport.quantize.count.counting import TokenCounter, read_tokenizer
from headport.quantize.count.held_out import RULE, HeldOutFile, check_unfinished
from headport.quantize.count.job import Job
from headport.quantize.count.near_duplicates import METHOD, SeenDocuments
from headport.quantize.count.table import (
    SCHEMA_VERSION,
    CountedFile,
    CountsRecord,
    Deduplication,
    HeldOut,
    TokenCounts,
    import_pyarrow,
    write_counts,
)
from headport.quantize.count.tally import Tally, TallyFile

__all__ = ["SUMMARY", "Options", "count", "describe", "run"]

SUMMARY = "Count how often a corpus uses each token of a model's tokenizer."

_CHECKED_CHARACTERS = 1 << 18


class Options(OptionRecord, frozen=True):
    """Options of `headport count`."""

    model: Annotated[Path, positional("checkpoint folder or bundle; its tokenizer.json is used")]
    corpus: Annotated[
        tuple[str, ...],
        option(
            "files, folders or patterns: text, .jsonl, .parquet; .gz, .xz, .zst", metavar="PATH"
        ),
    ]
    output: Annotated[Path, option("table to write (.parquet)", flag="-o", metavar="FILE")]
    field: Annotated[str, option("field of a JSON line, or column, that holds the text")] = "text"
    held_out: Annotated[
        float, option("share of the documents that is not counted but held out", metavar="SHARE")
    ] = 0.0
    held_out_text: Annotated[
        Path | None, option("also write the held-out documents as .jsonl", metavar="FILE")
    ] = None
    deduplicate: Annotated[bool, option("count nearly equal documents once")] = False
    skip_damaged: Annotated[
        bool, option("leave out documents that are no UTF-8 text or lack the field; else refused")
    ] = False
    processes: Annotated[int, option("counting processes (default: 0, one per CPU)")] = 0
    plain: Annotated[
        bool, option("encode every document as a whole, also where units of text would do")
    ] = False
    force: Annotated[
        bool, option("replace an existing table, or the unfinished count of another task")
    ] = False


def count(options: Options) -> TokenCounts:
    """Count a corpus and write the table.

    A run that was killed leaves a file beside the output, and the same command goes on from it; the
    table is the same as without interruption.

    Raises:
        UsageError: If an option, a file of the corpus or the tokenizer is not usable, a document is
            damaged and `skip_damaged` is off, or an unfinished count of something else is there.
        OutputError: If an output exists and `force` is False, or cannot be written.
        ParityError: If units and whole documents give different counts, which is a bug of ours.
    """
    _check(options)
    source = read_tokenizer(options.model)
    files = find_files(options.corpus)
    counter = TokenCounter(source, units=not options.plain)
    task = _task(options, source, files)
    state = TallyFile(options.output, task)
    corpus, tally = Corpus(files, options.field), _unfinished(state, options)
    if tally is None:
        tally = Tally.empty(counter.vocab_size, len(files))
        _check_units(counter, source, corpus)
    else:
        done = int(tally.file_documents.sum())
        say(f"{options.output}: an unfinished count goes on behind {done} documents")
    seen = SeenDocuments(tally.seen) if options.deduplicate else None
    tally.seen = None if seen is None else seen.bits
    held = None
    if options.held_out_text is not None:
        held = HeldOutFile(options.held_out_text, tally.totals.held_out_bytes)
    job = Job(
        source=source,
        corpus=corpus,
        tally=tally,
        state=state,
        units=not options.plain,
        held_out=options.held_out,
        held_out_file=held,
        seen=seen,
        skip_damaged=options.skip_damaged,
    )
    try:
        job.run(options.processes or usable_cpus())
        found = TokenCounts(tally.counts, _record(options, task, job, counter))
        if not found.record.tokens:
            raise UsageError(
                "--corpus: a document with a token was expected, none was counted; give more text, "
                "or hold out less of it"
            )
        write_counts(options.output, found, force=options.force)
        if held is not None:
            held.place()
    finally:
        if held is not None:
            held.close()
    state.discard()
    return found


def _unfinished(state: TallyFile, options: Options) -> Tally | None:
    try:
        found = state.load()
        if found is not None and options.held_out_text is not None:
            check_unfinished(options.held_out_text, found.totals.held_out_bytes)
    except UsageError:  # force counts anew only what cannot go on
        if options.force:
            return None
        raise
    return found


def _check(options: Options) -> None:
    import_pyarrow()
    if not 0 <= options.held_out < 1:
        raise UsageError(f"--held-out: 0 or more, less than 1 expected, {options.held_out} given")
    if options.processes < 0:
        raise UsageError(f"--processes: 0 or more expected, {options.processes} given")
    if options.held_out_text is not None and not options.held_out:
        raise UsageError("--held-out-text: nothing is held out; say how much with --held-out")
    if options.held_out_text is not None and options.held_out_text.suffix != ".jsonl":
        raise UsageError(f"--held-out-text: a .jsonl file expected, {options.held_out_text} given")
    for path in (options.output, options.held_out_text):
        if path is not None and path.exists() and not options.force:
            raise OutputError(f"{path} exists; choose another output or pass --force")
        if path is not None:
            path.absolute().parent.mkdir(parents=True, exist_ok=True)
            check_writable(path)


def _task(options: Options, source: str, files: Sequence[Path]) -> dict[str, Any]:
    """All that the counts depend on."""
    found = [(str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    return {
        "headport": __version__,
        "tokenizer": hashlib.sha256(source.encode()).hexdigest(),
        "files": found,
        "field": options.field,
        "held_out": options.held_out,
        "held_out_text": None if options.held_out_text is None else str(options.held_out_text),
        "deduplicate": options.deduplicate,
        "skip_damaged": options.skip_damaged,
        "plain": options.plain,  # the record names one way of counting
    }


def _check_units(counter: TokenCounter, source: str, corpus: Corpus) -> None:
    """Hold the beginning of the corpus, counted by units, against encoding it as a whole."""
    if not counter.counts_units:
        return
    texts, size = [], 0
    for document in corpus.documents():
        texts.append((document.text or "")[:_CHECKED_CHARACTERS])
        size += len(texts[-1])
        if size >= _CHECKED_CHARACTERS:
            break
    whole = TokenCounter(source, units=False).count(texts).counts
    odd = np.flatnonzero(counter.count(texts).counts != whole)
    if len(odd):
        raise ParityError(
            f"units of text and whole documents were expected to give the same counts, those of "
            f"token ids {odd[:10].tolist()} differ; pass --plain, and report this tokenizer"
        )


def _record(
    options: Options, task: dict[str, Any], job: Job, counter: TokenCounter
) -> CountsRecord:
    tally, totals = job.tally, job.tally.totals
    unseen = np.where(tally.counts == 0, tally.held_out, 0)
    held_out = HeldOut(
        share=options.held_out,
        rule=RULE,
        documents=totals.held_out_documents,
        tokens=int(tally.held_out.sum()),
        unseen_tokens=int(unseen.sum()),
        unseen_ids=int(np.count_nonzero(unseen)),
    )
    deduplication = None
    if job.seen is not None:
        deduplication = Deduplication(
            method=METHOD, documents=totals.duplicates, wrong_share=job.seen.wrong_share()
        )
    documents = tally.file_documents.tolist()
    files = zip(task["files"], job.corpus.files, documents, strict=True)
    return CountsRecord(
        schema_version=SCHEMA_VERSION,
        tokenizer_sha256=task["tokenizer"],
        vocab_size=counter.vocab_size,
        documents=totals.documents,
        tokens=int(tally.counts.sum()),
        bytes=totals.bytes,
        files=tuple(CountedFile(name=f.name, bytes=t[1], documents=n) for t, f, n in files),
        method="units" if counter.counts_units else "plain",
        method_reason=counter.reason,
        held_out=held_out if options.held_out else None,
        deduplication=deduplication,
        skipped_documents=totals.skipped,
    )


def run(options: Options) -> Outcome:
    """Count, and say what was found."""
    found = count(options)
    return Outcome(describe(found, options.output), found.record)


def describe(found: TokenCounts, path: Path) -> str:
    """The record in words."""
    record = found.record
    distinct = int(np.count_nonzero(found.counts))
    how = "by units of text" if record.method == "units" else "document by document"
    lines = [
        f"{path}: {record.tokens} tokens of {record.documents} documents "
        f"({record.bytes / 1e6:.1f} MB), {distinct} of {record.vocab_size} ids",
        f"counted {how}: {record.method_reason}",
    ]
    if record.held_out is not None:
        held = record.held_out
        share = held.unseen_tokens / max(1, held.tokens)
        lines.append(
            f"held out: {held.documents} documents, {held.tokens} tokens; {share:.3%} of these "
            f"are {held.unseen_ids} ids that the counted part does not use"
        )
    if record.deduplication is not None:
        lines.append(f"left out as near duplicates: {record.deduplication.documents} documents")
    if record.skipped_documents:
        lines.append(f"left out as damaged: {record.skipped_documents} documents")
    return "\n".join(lines)
