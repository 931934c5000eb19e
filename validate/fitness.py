"""Whether what was given can serve for what was asked: refused before anything is run."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

import numpy as np
import numpy.typing as npt

from headport.bundle import Bundle
from headport.condition import CONDITION_FILE
from headport.errors import CheckpointError, ParityError, UsageError
from headport.runtime.conditions import Condition
from headport.validate.gates import GateRule
from headport.validate.report import ReferenceFacts
from headport.validate.sides import ReferenceSide
from headport.validate.source_reader import SourceReader
from headport.validate.store import StoredReference
from headport.validate.top_rows import BOUNDED_METRICS
from headport.validate.wire import Ready

__all__ = [
    "MERGED_FIRST",
    "check_adapter",
    "check_conditioned",
    "check_kind",
    "check_known",
    "check_model",
    "check_sourced",
    "check_whole",
    "knows_top_only",
    "midpoint_of",
    "name_condition",
    "read_condition",
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


def check_conditioned(bundle: Bundle, condition: str | None, projection: Path | None) -> None:
    """Refuse a condition that one of the sides cannot be told.

    Raises:
        UsageError: If the bundle takes none, or only one of the two options is given.
    """
    if (condition is None) != (projection is None):
        missing, given = ("--condition", "--projection")
        if condition is not None:
            missing, given = given, missing
        raise UsageError(
            f"{missing}: expected beside {given}; the condition is named by --condition, and "
            "--projection is the file that `headport export --condition` was given, which the "
            "reference reads"
        )
    if condition is not None and CONDITION_FILE not in bundle.manifest.files:
        raise UsageError(
            f"--condition: {bundle.path} takes none; export the model with --condition FILE"
        )


def read_condition(given: str | None) -> Condition | None:
    """A condition's name, or the values of a .npy file.

    Raises:
        UsageError: If the file holds no plain array.
    """
    if given is None or not given.endswith(".npy"):
        return given
    try:
        found: npt.NDArray[np.float32] = np.load(given, allow_pickle=False).astype(np.float32)
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise UsageError(f"--condition {given}: no plain array in it: {error}") from error
    return found


def name_condition(given: str | None, condition: Condition | None) -> str:
    """How a report names it: its name, or its file with what the values are; "" for none."""
    if given is None:
        return ""
    if not isinstance(condition, np.ndarray):
        return given
    return f"{Path(given).name} (sha256 {sha256(condition.tobytes()).hexdigest()[:16]})"


def check_whole(bundle: Bundle) -> None:
    """Refuse a bundle whose vocabulary was pruned.

    Raises:
        UsageError: If it was.
    """
    vocabulary = bundle.manifest.vocabulary
    if vocabulary.map is not None or vocabulary.checkpoint_ids is not None:
        raise UsageError(
            f"{bundle.path}: its vocabulary is pruned, and figures over different vocabularies "
            "cannot be compared; validate the bundle it was pruned from, and let `headport price` "
            "say what pruning costs"
        )


_OF_TEXTS_ALONE = {
    "--bisect": "the states between its layers depend on a source as well",
    "--overlap": "a target is fed at once, behind the token that its decoder starts with",
}


def check_sourced(bundle: Bundle, asked: Sequence[str], stored: StoredReference | None) -> None:
    """Refuse what is not done for encoder-decoder bundles.

    Args:
        bundle: The candidate.
        asked: Options that were given, of those that this table knows.
        stored: The reference, where it is a stored one.

    Raises:
        UsageError: Naming the first.
    """
    if bundle.manifest.source is None:
        return
    if stored is not None:
        raise UsageError(
            f"{stored.path}: a stored reference knows no sources, and {bundle.path} is of an "
            "encoder-decoder model; pass the checkpoint it was exported from"
        )
    for name in asked:
        raise UsageError(
            f"{name}: {bundle.path} is of an encoder-decoder model, {_OF_TEXTS_ALONE[name]}; leave "
            "it out"
        )


def check_kind(bundle: Bundle, ready: Ready, sources: SourceReader | None) -> None:
    """Refuse to compare a decoder that answers to sources with one that does not.

    Raises:
        UsageError: If only one of them does.
        ParityError: If both start from another token.
    """
    start = None if sources is None else sources.start_token
    if (start is None) != (ready.start_token is None):
        names = ("an encoder-decoder model", "a model without an encoder")
        bundles, references = names if start is not None else names[::-1]
        raise UsageError(
            f"{bundle.path} is of {bundles}, the reference {ready.facts.checkpoint} is "
            f"{references}; pass the checkpoint that the bundle was exported from"
        )
    if start != ready.start_token:
        raise ParityError(
            f"{bundle.path}: its decoder starts with token {start}, the reference's with "
            f"{ready.start_token}; export the bundle again from this checkpoint"
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
