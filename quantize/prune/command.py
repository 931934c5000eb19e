"""`headport prune`: portable bundle → portable bundle that gives fewer tokens."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from headport.bundle import Bundle, Draft, check_output, draft_bundle, refuse_overlap
from headport.command import Outcome
from headport.errors import QuantizeError
from headport.graphs import add_stage, load_graphs, rewrite_bundle
from headport.manifest import Manifest, Vocabulary
from headport.quantize.prune.check import Pruned, check_pruned
from headport.quantize.prune.closure import Closure, always_kept
from headport.quantize.prune.companions import renaming, rewrite_companions
from headport.quantize.prune.cut import columns_of, cut_heads, cut_tables, described_heads
from headport.quantize.prune.id_fields import rename_fields
from headport.quantize.prune.options import Options
from headport.quantize.prune.report import PruneReport, head_bytes, summary
from headport.quantize.prune.request import check_options, chosen_options, selection_of
from headport.quantize.prune.rewrite import refuse_tokenizer
from headport.quantize.prune.selection import Selection
from headport.quantize.prune.task_heads import refuse_clusters, renumbered
from headport.quantize.prune.tokenizer_check import check_rewritten
from headport.quantize.prune.tokens import TokenTable, read_tokens
from headport.selftest import write_selftest
from headport.vocabulary_map import read_map

__all__ = ["SUMMARY", "Options", "check", "prune", "run"]

SUMMARY = "Keep the part of the vocabulary that a domain uses."

Int64 = npt.NDArray[np.int64]

_MAP = "vocab_map.npy"
_CHECKPOINT_IDS = "checkpoint_ids.npy"


def check(options: Options) -> None:
    """Refuse options that contradict each other, or choose nothing.

    Raises:
        UsageError: If they do.
    """
    check_options(options)


def prune(options: Options) -> Bundle:
    """Prune a bundle's vocabulary.

    Raises:
        UsageError: If the options contradict each other or name unknown tokens, the corpus chooses
            too few, or both halves of an encoder-decoder model are to be pruned.
        QuantizeError: If the bundle is lowered, or of a form that cannot be pruned.
        BundleError: If the bundle is damaged.
        OutputError: If the output cannot be written.
        ParityError: If what was written does not answer for the kept tokens as before.
    """
    check(options)
    refuse_overlap(options.bundle, options.output)
    check_output(options.output, force=options.force)
    source = Bundle.open(options.bundle)
    if options.mode == "both":
        source.require_decoder_only(
            "--mode both", "its sources need the whole vocabulary, so use --mode output"
        )
    _refuse(source)
    table = read_tokens(source)
    if options.mode == "both":
        refuse_tokenizer(table, source.manifest.vocabulary.size)
    closure = always_kept(source, table)
    available = _available(source, table, options.mode)
    selection = selection_of(options, source, closure, available)
    with draft_bundle(options.output, force=options.force) as draft:
        if _keeps_all(source, selection.kept, options.mode):
            models = load_graphs(source)
            preview = draft.preview(rewrite_bundle(source, models, draft.path))
            report = _report(source, preview.manifest, closure, selection)
        else:
            preview, report = _write(draft, source, closure, selection, options.mode)
        manifest = write_selftest(preview)
        return draft.commit(add_stage(manifest, "prune", chosen_options(options), asdict(report)))


def _refuse(source: Bundle) -> None:
    manifest = source.manifest
    if manifest.target != "portable":
        raise QuantizeError(
            f"{source.path} is lowered to {manifest.target}; prune the portable bundle it was "
            "made from, then lower again"
        )
    encoders = [name for name, graph in manifest.graphs.items() if graph.role == "encoder"]
    if encoders and manifest.source is None:
        raise QuantizeError(
            f"{source.path} has an encoder ({', '.join(encoders)}) and no decoder: its head is "
            "asked about the tokens it reads; keep its vocabulary whole"
        )
    refuse_clusters(manifest, str(source.path))
    width = manifest.vocabulary.kept_size or manifest.vocabulary.padded_size
    for name, head in manifest.heads.items():
        if head.vocab_size != width:
            raise QuantizeError(
                f"{source.path}: head {name} gives {head.vocab_size} outputs per row, one for each "
                f"of {width} tokens was expected; such a head cannot be pruned"
            )


def _head_ids(source: Bundle) -> Int64:
    """Id of each column of the heads, padding left out."""
    found = read_map(source)
    return np.arange(source.manifest.vocabulary.size) if found is None else found


def _available(source: Bundle, table: TokenTable, mode: str) -> Int64:
    """Ids that may be kept; a rewritten tokenizer has no place for one without a token."""
    ids = _head_ids(source)
    return ids if mode == "output" else ids[np.isin(ids, list(table.pieces))]


def _keeps_all(source: Bundle, kept: Int64, mode: str) -> bool:
    vocabulary = source.manifest.vocabulary
    if mode == "output":
        return len(kept) == len(_head_ids(source))
    return vocabulary.map is None and len(kept) == vocabulary.padded_size


def _write(
    draft: Draft, source: Bundle, closure: Closure, selection: Selection, mode: str
) -> tuple[Bundle, PruneReport]:
    """Write the pruned bundle, not sealed yet, and check what was written."""
    kept, both = selection.kept, mode == "both"
    models = load_graphs(source)
    columns = columns_of(kept, _head_ids(source))
    done = Pruned(
        token_ids=kept,
        columns=columns,
        renumbered=both,
        heads=cut_heads(source.manifest, models, columns, alone=not both),
        tables=cut_tables(source.manifest, models, kept) if both else (),
    )
    manifest = rewrite_bundle(source, models, draft.path)
    heads = described_heads(source.manifest, manifest, done.heads, len(kept))
    manifest = msgspec.structs.replace(manifest, heads=heads)
    notes: list[str] = []
    if both:
        manifest, notes = _renumber(draft.path, source, manifest, closure.table, kept)
    else:
        np.save(draft.path / _MAP, kept.astype(np.int32))
        vocabulary = msgspec.structs.replace(manifest.vocabulary, kept_size=len(kept), map=_MAP)
        manifest = msgspec.structs.replace(manifest, vocabulary=vocabulary)
    preview = draft.preview(manifest)
    report = _report(source, preview.manifest, closure, selection)
    return preview, replace(
        report,
        notes=(*report.notes, *notes),
        tokenizer=check_rewritten(closure.table, preview.path, kept) if both else None,
        check=check_pruned(source, preview, done),
    )


def _renumber(
    folder: Path, source: Bundle, manifest: Manifest, table: TokenTable, kept: Int64
) -> tuple[Manifest, list[str]]:
    """Give everything that names ids in a draft, and in its manifest, the new ones."""
    before = source.manifest.vocabulary
    sizes = frozenset({before.size, before.padded_size})
    notes = rewrite_companions(folder, table, kept, sizes)
    (folder / _MAP).unlink(missing_ok=True)
    first = kept
    if before.checkpoint_ids is not None:
        first = np.load(source.file(before.checkpoint_ids), allow_pickle=False)[kept]
    np.save(folder / _CHECKPOINT_IDS, first.astype(np.int32))
    defaults, _ = rename_fields(manifest.defaults, renaming(kept))
    vocabulary = Vocabulary(
        size=len(kept),
        padded_size=len(kept),
        kept_size=None,
        map=None,
        checkpoint_ids=_CHECKPOINT_IDS,
    )
    task_heads = renumbered(source.manifest, kept)
    changed = msgspec.structs.replace(
        manifest, defaults=defaults, vocabulary=vocabulary, task_heads=task_heads
    )
    return changed, notes


def _report(source: Bundle, after: Manifest, closure: Closure, selection: Selection) -> PruneReport:
    return PruneReport(
        before=len(_head_ids(source)),
        kept=len(selection.kept),
        by_reason=selection.by_reason,
        covered=selection.covered,
        dropped=selection.dropped,
        head_bytes_before=head_bytes(source.manifest),
        head_bytes_after=head_bytes(after),
        tensor_bytes_before=sum(t.length for t in source.manifest.tensors),
        tensor_bytes_after=sum(t.length for t in after.tensors),
        untied=any(
            head.tied and not after.heads[name].tied for name, head in source.manifest.heads.items()
        ),
        tokenizer_sha256=closure.table.sha256,
        notes=closure.notes,
        check=None,
        tokenizer=None,
    )


def run(options: Options) -> Outcome:
    """Prune and say what stayed, and why."""
    bundle = prune(options)
    stage = bundle.manifest.provenance.stages[-1]
    text = summary(bundle, stage.report)
    return Outcome(text, {"bundle": str(options.output), "manifest": bundle.manifest})
