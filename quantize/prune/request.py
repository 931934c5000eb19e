"""From the options of `headport prune` to the kept ids."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from headport.bundle import Bundle
from headport.errors import QuantizeError, UsageError
from headport.quantize.count.command import Options as CountOptions
from headport.quantize.count.command import count
from headport.quantize.count.table import read_counts
from headport.quantize.prune.closure import Closure
from headport.quantize.prune.options import Options
from headport.quantize.prune.selection import Limits, Selection, Wanted, select
from headport.quantize.prune.token_file import read_token_file

__all__ = ["check_options", "chosen_options", "selection_of"]

Int64 = npt.NDArray[np.int64]

_SHOWN = 20  # tokens named in a message
_FIELD = "text"
_UNION_SIZE = 4096


def check_options(options: Options) -> None:
    """Refuse options that contradict each other, or choose nothing.

    Raises:
        UsageError: If they do, naming all faults.
    """
    at_least = {"min_count": 0, "max_size": 1, "union_size": 1, "least": 0}
    faults = []
    for name, least in at_least.items():
        value = getattr(options, name)
        if value is not None and value < least:
            faults.append(f"--{name.replace('_', '-')} {value}: {least} or more expected")
    if not 0 < options.coverage <= 1:
        faults.append(f"--coverage {options.coverage}: above 0 and at most 1 expected")
    counted = options.counts is not None or bool(options.corpus)
    if options.counts is not None and options.corpus:
        faults.append("--counts and --corpus both say what a domain uses: give one of them")
    if not counted and options.keep is None and options.min_count > 0:
        faults.append("nothing says which tokens to keep: give --counts, --corpus or --keep")
    if not counted and options.coverage < 1:
        faults.append("--coverage is a share of a corpus: give --counts or --corpus with it")
    if options.field is not None and not options.corpus:
        faults.append("--field says where a corpus holds its text: give --corpus with it")
    if options.union_size is not None and not options.union:
        faults.append("--union-size is how many tokens of other counts stay: give --union with it")
    if faults:
        raise UsageError("; ".join(faults))


def selection_of(options: Options, source: Bundle, closure: Closure, available: Int64) -> Selection:
    """The kept ids.

    Args:
        options: What the caller wants.
        source: The bundle.
        closure: What is always kept, and what each token needs.
        available: Ids that the bundle can give.

    Raises:
        UsageError: If a file cannot be used, names unknown tokens or tokens that are gone, belongs
            to another tokenizer, or the options choose too little.
        QuantizeError: If the bundle lacks tokens that are always kept.
    """
    present = set(available.tolist())
    # An id that no token has can be named by a configuration all the same.
    if missing := (closure.base - present) & closure.table.pieces.keys():
        raise QuantizeError(
            f"the bundle was pruned before and lacks {len(missing)} tokens that are always kept, "
            f"such as {closure.table.pieces.get(min(missing))!r} (id:{min(missing)}); prune the "
            "bundle it was made from"
        )
    keep = _named(options.keep, closure, "--keep")
    if gone := sorted(keep - present):
        shown = ", ".join(f"{closure.table.pieces.get(i)!r} (id:{i})" for i in gone[:_SHOWN])
        raise UsageError(
            f"--keep: {len(gone)} of these ids were cut before, or --mode both has no token for "
            f"them: {shown}; leave them out, or prune the bundle this one was made from"
        )
    wanted = Wanted(
        counts=_corpus_counts(options, source, closure),
        keep=keep,
        drop=_named(options.drop, closure, "--drop"),
        union=tuple(
            _most_frequent(_counts(path, source, closure), options.union_size or _UNION_SIZE)
            for path in options.union
        ),
    )
    limits = Limits(options.min_count, options.coverage, options.max_size, options.least)
    return select(closure, available.tolist(), wanted, limits)


def _named(path: Path | None, closure: Closure, flag: str) -> frozenset[int]:
    if path is None:
        return frozenset()
    return frozenset(read_token_file(path, closure.table, closure.size, flag))


def _most_frequent(counts: Int64, size: int) -> Int64:
    order = np.argsort(-counts, kind="stable")[:size]
    return order[counts[order] > 0]


def _corpus_counts(options: Options, source: Bundle, closure: Closure) -> Int64 | None:
    if options.counts is not None:
        return _counts(options.counts, source, closure)
    if not options.corpus:
        return None
    with tempfile.TemporaryDirectory(prefix="headport.") as folder:
        table = Path(folder) / "counts.parquet"
        count(
            CountOptions(
                model=source.path,
                corpus=options.corpus,
                field=options.field or _FIELD,
                output=table,
            )
        )
        return _counts(table, source, closure)


def _counts(path: Path, source: Bundle, closure: Closure) -> Int64:
    """Counts by the bundle's ids, [V], also of the tokenizer that the bundle started with."""
    found = read_counts(path)
    ids = np.arange(closure.size)
    if found.record.tokenizer_sha256 != closure.table.sha256:
        first = _first_tokenizer(source)
        if first is None or found.record.tokenizer_sha256 != first[0]:
            raise UsageError(
                f"{path}: counts by the bundle's own tokenizer were expected (tokenizer.json of "
                f"sha256 {closure.table.sha256[:16]}…), those of another one found "
                f"({found.record.tokenizer_sha256[:16]}…); count with the model of this bundle"
            )
        ids = first[1]
    known = ids < len(found.counts)
    counts = np.zeros(closure.size, np.int64)
    counts[known] = found.counts[ids[known]]
    return counts


def _first_tokenizer(source: Bundle) -> tuple[str, Int64] | None:
    """The checkpoint's tokenizer where pruning rewrote it: sha256, and its id of each own id."""
    file = source.manifest.vocabulary.checkpoint_ids
    if file is None:
        return None
    ids: Int64 = np.load(source.file(file), allow_pickle=False).astype(np.int64)
    for stage in source.manifest.provenance.stages:
        if stage.stage == "prune" and stage.options["mode"] == "both":
            return str(stage.report["tokenizer_sha256"]), ids
    return None


def chosen_options(options: Options) -> dict[str, Any]:
    """What was asked for, as the provenance keeps it: files by name, without their folders."""
    return {
        "mode": options.mode,
        "counts": None if options.counts is None else options.counts.name,
        "corpus": [Path(path).name for path in options.corpus],
        "field": (options.field or _FIELD) if options.corpus else None,
        "min_count": options.min_count,
        "coverage": options.coverage,
        "max_size": options.max_size,
        "keep": None if options.keep is None else options.keep.name,
        "drop": None if options.drop is None else options.drop.name,
        "union": [path.name for path in options.union],
        "union_size": (options.union_size or _UNION_SIZE) if options.union else None,
    }
