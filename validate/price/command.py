"""`headport price`: what pruning a vocabulary costs on text that was not counted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import numpy as np

from headport.bundle import Bundle, check_text_files, write_text
from headport.command import OptionRecord, Outcome, option, positional
from headport.errors import UsageError
from headport.machine import usable_cpus
from headport.quantize.count.table import TokenCounts, read_counts
from headport.quantize.prune.closure import always_kept
from headport.quantize.prune.report import head_bytes
from headport.quantize.prune.tokens import read_tokens
from headport.validate.candidate import Candidate
from headport.validate.comparison import check_ids, prepare
from headport.validate.documents import read_texts
from headport.validate.fitness import MERGED_FIRST, check_adapter, check_model
from headport.validate.price.curve import KeepOrder, keep_order
from headport.validate.price.kept import KeptTokenizer, kept_tokenizer, read_kept
from headport.validate.price.material import priced_documents
from headport.validate.price.measure import measure
from headport.validate.price.report import PriceReport
from headport.validate.price.speed import step_ms
from headport.validate.price.spelling import Spelled, spell
from headport.validate.price.summary import Findings, make_report
from headport.validate.price.tables import (
    render_html,
    render_lines,
    render_page,
)
from headport.validate.reference_process import ReferenceProcess
from headport.validate.sides import ReferenceSide
from headport.validate.store import is_store

__all__ = ["SUMMARY", "Options", "price", "price_with", "run"]

SUMMARY = "Say what a pruned bundle lost, on text that was not counted, and where to cut."

_TRUST = ("trust_remote_code", "allow_pickle")


class Options(OptionRecord, frozen=True):
    """Options of `headport price`."""

    bundle: Annotated[Path, positional("bundle before pruning")]
    pruned: Annotated[Path, option("the pruned bundle", metavar="BUNDLE")]
    reference: Annotated[
        str,
        option("Hugging Face folder, .gguf or module:function of the model", metavar="MODEL"),
    ]
    text: Annotated[
        tuple[Path, ...],
        option("held-out UTF-8 texts or .jsonl, each reported by name", metavar="FILE"),
    ]
    counts: Annotated[
        Path | None,
        option("table of `headport count`: adds the curve over K and a suggested cut"),
    ] = None
    max_tokens: Annotated[
        int, option("tokens to score in all, an equal share of each text (default: 0, all)")
    ] = 0
    window: Annotated[int, option("tokens fed at once at most; the context bounds it too")] = 1024
    max_lost_mass: Annotated[
        float, option("probability that the suggested cut may lose", metavar="SHARE")
    ] = 0.001
    markdown: Annotated[Path | None, option("also write the report as Markdown")] = None
    html: Annotated[Path | None, option("also write the report as one HTML page")] = None
    force: Annotated[bool, option("replace existing --markdown and --html files")] = False
    trust_remote_code: Annotated[bool, option("as for export")] = False
    allow_pickle: Annotated[bool, option("as for export")] = False


def price(options: Options) -> PriceReport:
    """Compare a bundle, its pruned form and the reference on held-out text.

    Raises:
        UsageError: If an option or a file is not usable, or the bundles do not belong together.
        BundleError: If a bundle is damaged.
        CheckpointError: If the reference cannot be loaded.
        OutputError: If an output exists and `force` is False.
        ParityError: If bundle and reference split a text into different tokens.
        NonFiniteError: If a logit is NaN or infinite.
        ReferenceProcessError: If the reference process died.
    """
    _check(options)
    flags = [f"--{n.replace('_', '-')}" for n in _TRUST if getattr(options, n)]
    threads = usable_cpus() - _own_threads()
    with ReferenceProcess(options.reference, threads, *flags) as reference:
        return price_with(reference, options)


def price_with(reference: ReferenceSide, options: Options) -> PriceReport:
    """As `price`, with a reference that is already running and may serve again."""
    _check(options)
    texts = read_texts(options.text)
    bundle, pruned = Bundle.open(options.bundle), Bundle.open(options.pruned)
    for each in (bundle, pruned):
        each.require_decoder_only("a price of pruning", "keep its whole vocabulary")
        each.require_no_prefix(
            "a price of pruning, whose reference takes no adapter",
            "price the same cut of the model without its adapter",
        )
        if "lm" not in each.manifest.heads:
            raise UsageError(f"{each.path}: a head 'lm' was expected, it has none")
    kept = read_kept(bundle, pruned)
    counts = None if options.counts is None else _counts(options.counts, bundle)
    before = Candidate(bundle, _own_threads())
    after = Candidate(pruned, _own_threads())
    materials = prepare(texts, before, options.max_tokens)
    facts = reference.ready().facts
    check_adapter(bundle, facts, None, MERGED_FIRST)
    if facts.vocab_size != before.vocab_size:
        raise UsageError(
            f"logits over the same vocabulary expected, the reference gives {facts.vocab_size} and "
            f"{bundle.path} {before.vocab_size}; pass the checkpoint it was exported from"
        )
    check_ids(materials, before, reference)
    window = min(options.window, before.context, after.context)
    documents = priced_documents(materials, before)
    order = None if counts is None else _order(bundle, counts, before.vocab_size)
    measured = measure(
        documents, reference, after, kept, order, window=window, block_rows=before.block_rows
    )
    tokenizer = kept_tokenizer(bundle, pruned, kept)
    spelled: Sequence[Spelled] = ()
    if isinstance(tokenizer, KeptTokenizer):
        spelled = spell(documents, before, after, tokenizer, kept, window=window)
    found = Findings(
        bundle=bundle,
        pruned=pruned,
        reference=facts.checkpoint,
        reference_sha256=facts.sha256,
        kept=kept,
        counts=counts,
        documents=documents,
        measured=measured,
        order=order,
        spelled=spelled,
        unspelled="" if isinstance(tokenizer, KeptTokenizer) else tokenizer,
        step_ms=step_ms((before, after)),
        head_bytes=(head_bytes(bundle.manifest), head_bytes(pruned.manifest)),
    )
    return make_report(found, before, [text.name for text in texts], options.max_lost_mass)


def _own_threads() -> int:
    # The reference computes at the same time.
    return max(1, usable_cpus() // 2)


def _counts(path: Path, bundle: Bundle) -> TokenCounts:
    found, own = read_counts(path), read_tokens(bundle)
    if found.record.tokenizer_sha256 != own.sha256:
        raise UsageError(
            f"{path}: counts by the tokenizer of {bundle.path} were expected (sha256 "
            f"{own.sha256[:16]}…), those of another found ({found.record.tokenizer_sha256[:16]}…)"
        )
    return found


def _order(bundle: Bundle, counts: TokenCounts, size: int) -> KeepOrder:
    closure = always_kept(bundle, read_tokens(bundle))
    padded = np.zeros(size, np.int64)
    width = min(size, len(counts.counts))
    padded[:width] = counts.counts[:width]
    return keep_order(padded, closure.base, closure.with_needs, size)


def _check(options: Options) -> None:
    if not options.text:
        raise UsageError("--text: at least one file expected, none given")
    if options.window < 1:
        raise UsageError(f"--window: at least 1 expected, {options.window} given")
    if 0 < options.max_tokens < len(options.text) or options.max_tokens < 0:
        raise UsageError(
            f"--max-tokens: 0, or at least one for each of {len(options.text)} texts expected, "
            f"{options.max_tokens} given"
        )
    if not 0 <= options.max_lost_mass < 1:
        raise UsageError(
            f"--max-lost-mass: 0 or more, less than 1 expected, {options.max_lost_mass} given"
        )
    if is_store(options.reference):
        raise UsageError(
            f"--reference {options.reference}: a model was expected, a stored reference brings its "
            "own texts"
        )
    check_model(options.reference)
    check_text_files((options.markdown, options.html), force=options.force)


def run(options: Options) -> Outcome:
    """Price, and write what was asked for."""
    report = price(options)
    pages = ((options.markdown, render_page), (options.html, render_html))
    files = {path: render(report) for path, render in pages if path is not None}
    write_text(files, force=options.force)
    return Outcome(render_lines(report), report)
