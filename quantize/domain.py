"""`headport domain`: a bundle that carries a named set of tokens; nothing else in it changes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np

from headport.bundle import Bundle, copy_files, draft_bundle, refuse_overlap
from headport.command import OptionRecord, Outcome, option, positional
from headport.domains import check_domain_name, domain_names, write_domain
from headport.errors import UsageError
from headport.graphs import add_stage
from headport.quantize.prune.closure import always_kept
from headport.quantize.prune.options import Options as PruneOptions
from headport.quantize.prune.request import check_options, selection_of
from headport.quantize.prune.tokens import read_tokens
from headport.vocabulary_map import read_map

__all__ = ["SUMMARY", "Options", "run", "save_domain"]

SUMMARY = "Save a domain's tokens in a bundle, to be allowed for a request by name."


class Options(OptionRecord, frozen=True):
    """Options of `headport domain`."""

    bundle: Annotated[Path, positional("bundle to read, portable or lowered")]
    output: Annotated[Path, option("bundle folder to write", flag="-o", metavar="BUNDLE")]
    name: Annotated[str, option("the domain's name")]
    counts: Annotated[
        Path | None,
        option("how often a corpus uses each token, as `headport count` wrote it", metavar="FILE"),
    ] = None
    min_count: Annotated[int, option("tokens that occur this often", metavar="N")] = 1
    coverage: Annotated[
        float, option("as many of the most frequent tokens as make up this share of the corpus")
    ] = 1.0
    max_size: Annotated[
        int | None, option("at most this many tokens in all (default: no limit)", metavar="K")
    ] = None
    keep: Annotated[
        Path | None,
        option("tokens, one per line: spelling, id:N or text:…", metavar="FILE"),
    ] = None
    force: Annotated[
        bool, option("replace an existing bundle, and a domain of this name in it")
    ] = False


def save_domain(options: Options) -> Bundle:
    """Write a bundle that carries a domain beside all that it carried before.

    The tokens are those that `headport prune` would keep: chosen ones, and what spells any text
    and ends it.

    Raises:
        UsageError: If the name or the options are not usable, the bundle carries such a domain and
            `force` is False, or the corpus chooses too few tokens.
        BundleError: If the bundle is damaged.
        OutputError: If the output cannot be written.
    """
    check_domain_name(options.name)
    chosen = PruneOptions(
        bundle=options.bundle,
        output=options.output,
        counts=options.counts,
        min_count=options.min_count,
        coverage=options.coverage,
        max_size=options.max_size,
        keep=options.keep,
        least=0,  # a few labels are a domain as well
    )
    check_options(chosen)
    refuse_overlap(options.bundle, options.output)
    source = Bundle.open(options.bundle)
    source.require_decoder_only(
        "a domain of its vocabulary", "pass the tokens as allowed with each call"
    )
    manifest = source.manifest
    if options.name in domain_names(source) and not options.force:
        raise UsageError(
            f"{source.path}: it carries a domain {options.name!r} already; choose another name, or "
            "pass --force to replace it"
        )
    closure = always_kept(source, read_tokens(source))
    kept = read_map(source)
    available = np.arange(manifest.vocabulary.size) if kept is None else kept
    selection = selection_of(chosen, source, closure, available)
    with draft_bundle(options.output, force=options.force) as draft:
        copy_files(source.path, manifest.files, draft.path)
        write_domain(draft.path, options.name, selection.kept, closure.table.sha256)
        report = {"tokens": len(selection.kept), "by_reason": selection.by_reason}
        asked = {"name": options.name, "min_count": options.min_count}
        asked |= {"coverage": options.coverage, "max_size": options.max_size}
        return draft.commit(
            add_stage(msgspec.structs.replace(manifest, files={}), "domain", asked, report)
        )


def run(options: Options) -> Outcome:
    """Save a domain and say how large it is."""
    bundle = save_domain(options)
    report = bundle.manifest.provenance.stages[-1].report
    reasons = ", ".join(f"{count} {reason}" for reason, count in report["by_reason"].items())
    text = f"{bundle.path.name}: domain {options.name} of {report['tokens']} tokens ({reasons})"
    return Outcome(text, {"bundle": str(options.output), "report": report})
