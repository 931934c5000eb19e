"""Options of `headport prune`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from headport.command import OptionRecord, option, positional

__all__ = ["Options"]


class Options(OptionRecord, frozen=True):
    """Options of `headport prune`."""

    bundle: Annotated[Path, positional("portable bundle to read")]
    output: Annotated[Path, option("bundle folder to write", flag="-o", metavar="BUNDLE")]
    counts: Annotated[
        Path | None,
        option("how often a corpus uses each token, as `headport count` wrote it", metavar="FILE"),
    ] = None
    corpus: Annotated[
        tuple[str, ...],
        option(
            "count these texts instead: files, folders or patterns, as for `headport count`",
            metavar="PATH",
        ),
    ] = ()
    field: Annotated[
        str | None,
        option("--corpus: field of a JSON line, or column, that holds the text (default: text)"),
    ] = None
    mode: Annotated[
        Literal["output", "both"],
        option(
            "output: the head alone is cut, callers go on seeing the original ids; both: the input "
            "embedding as well, tokenizer and configuration get new ids"
        ),
    ] = "output"
    min_count: Annotated[
        int, option("keep tokens that occur this often; 0: also those that never do", metavar="N")
    ] = 1
    coverage: Annotated[
        float, option("as many of the most frequent tokens as make up this share of the corpus")
    ] = 1.0
    max_size: Annotated[
        int | None, option("keep at most this many tokens in all (default: no limit)", metavar="K")
    ] = None
    keep: Annotated[
        Path | None,
        option("tokens to keep, one per line: spelling, id:N or text:…", metavar="FILE"),
    ] = None
    drop: Annotated[
        Path | None,
        option(
            "tokens to drop, likewise, and with them those that are made of them", metavar="FILE"
        ),
    ] = None
    union: Annotated[
        tuple[Path, ...],
        option(
            "counts of other texts, such as a general corpus, whose most frequent tokens stay",
            metavar="FILE",
        ),
    ] = ()
    union_size: Annotated[
        int | None,
        option("how many tokens of each --union file stay (default: 4096)", metavar="N"),
    ] = None
    least: Annotated[
        int | None,
        option(
            "refuse a corpus that chooses fewer tokens than this besides those that are always "
            "kept (default: 256, or an eighth of a small vocabulary)",
            metavar="N",
        ),
    ] = None
    force: Annotated[bool, option("replace an existing bundle")] = False
