"""Whether what was given can serve for what was asked: refused before anything is run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from headport.bundle import Bundle
from headport.errors import CheckpointError, UsageError
from headport.validate.gates import GateRule
from headport.validate.report import ReferenceFacts
from headport.validate.sides import ReferenceSide
from headport.validate.store import StoredReference
from headport.validate.top_rows import BOUNDED_METRICS

__all__ = [
    "MERGED_FIRST",
    "check_adapter",
    "check_known",
    "check_model",
    "knows_top_only",
    "midpoint_of",
]

MERGED_FIRST = (  # for verbs that take no --adapter
    "merge it with PEFT's merge_and_unload, save the model and pass that as the reference"
)


def check_model(reference: str) -> None:
    """Refuse a reference of which nothing is there; its process would need seconds to say so.

    Raises:
        CheckpointError: If it is neither a path that exists nor may be `module:function`.
    """
    if not Path(reference).exists() and ":" not in reference:
        raise CheckpointError(
            f"{reference}: a Hugging Face folder, a .gguf file or module:function was expected, "
            "nothing is there"
        )


def check_adapter(
    bundle: Bundle, reference: ReferenceFacts, given: Path | None, remedy: str
) -> None:
    """Refuse to compare a bundle that holds an adapter with a reference that lacks it.

    Args:
        bundle: The candidate.
        reference: Facts of what it is compared with.
        given: The adapter that the reference was given.
        remedy: What to do where it was given none.

    Raises:
        UsageError: If the reference is the model without the bundle's adapter, or was given
            another one. A reference of other weights is not judged: it may be the merged model.
    """
    provenance = bundle.manifest.provenance
    merged = provenance.stages[0].report.get("adapter") if provenance.stages else None
    if given is not None and reference.sha256 != provenance.sha256:
        raise UsageError(
            f"--adapter: {bundle.path} was exported from {provenance.checkpoint}, the reference is "
            f"{reference.checkpoint} with other weights; pass the model and the adapter that the "
            "bundle was exported from"
        )
    if merged is not None and reference.sha256 == merged["checkpoint_sha256"]:
        raise UsageError(
            f"{bundle.path} was exported with the adapter {merged['name']}, the reference "
            f"{reference.checkpoint} is the model without it; {remedy}"
        )


def knows_top_only(reference: ReferenceSide | None) -> bool:
    """Whether a reference keeps the likeliest tokens of each position and no more."""
    return isinstance(reference, StoredReference) and reference.store.top is not None


def check_known(
    gates: Path | None, rules: Sequence[GateRule], baseline: Path | None, stored: StoredReference
) -> None:
    """Refuse what a reference of likeliest tokens alone cannot decide.

    Raises:
        UsageError: If a gate is on a figure of which only a bound is known, or an earlier report
            is to be held against.
    """
    blind = sorted({r.metric for r in rules if r.metric.startswith(BOUNDED_METRICS)})
    if blind:
        raise UsageError(
            f"{gates}: {stored.path} keeps the likeliest tokens only, which decide no gate on "
            f"{', '.join(blind)}; hold agreements, perplexity_ratio or delta_p, or write the store "
            "without --top"
        )
    if baseline is not None:
        raise UsageError(
            f"--baseline: {stored.path} keeps the likeliest tokens only, so no KL can be held "
            "against an earlier one; leave it out"
        )


def midpoint_of(path: Path, bundle: Bundle) -> Bundle:
    """The bundle before quantisation, which must be that.

    Raises:
        UsageError: If something in it is quantised, or it comes from another checkpoint.
    """
    found = Bundle.open(path)
    manifest = found.manifest
    quantised = [n for n, head in manifest.heads.items() if head.quantization is not None]
    quantised += ["backbone"] if manifest.backbone_quantization is not None else []
    if quantised:
        raise UsageError(
            f"--unquantised: {path} holds quantised weights ({', '.join(quantised)}); pass the "
            "bundle that `headport export` wrote, or its lowering"
        )
    if manifest.provenance.sha256 != bundle.manifest.provenance.sha256:
        raise UsageError(
            f"--unquantised: {path} was exported from {manifest.provenance.checkpoint}, "
            f"{bundle.path} from another checkpoint, {bundle.manifest.provenance.checkpoint}; "
            "pass the bundle that it was quantised from"
        )
    return found
