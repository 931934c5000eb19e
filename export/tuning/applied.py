"""An adapter applied to its model: as it is exported, and as it was trained.

    LoRA            merged into the weights          beside the weights
    learnt tokens   in the caches from the start     read before the prompt; a prefix in the caches

The export writes the one form and holds it against the other, which shares no arithmetic with it: a
transposed product, a wrong sign or a forgotten layer shows in the parity.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headport.errors import ExportError
from headport.export.checkpoint import SOURCED, Checkpoint, ModelKind
from headport.export.tuning.beginnings import begin_with
from headport.export.tuning.begun import Begun
from headport.export.tuning.files import AdapterFiles, AdapterName, read_adapter
from headport.export.tuning.learnt import find_learnt
from headport.export.tuning.learnt_config import LEARNT
from headport.export.tuning.lora import find_tuned
from headport.export.tuning.merged import Merged, add_beside
from headport.export.tuning.tuning import Tuning

__all__ = ["apply_adapter", "check_adaptable", "put_beside"]


def _is_learnt(files: AdapterFiles) -> bool:
    return files.config.get("peft_type") in LEARNT


def apply_adapter(model: Any, folder: Path, kind: ModelKind = "causal") -> Tuning:
    """Read an adapter, hold it against the model and apply it in float32.

    Raises:
        CheckpointError: If it cannot be read, is incomplete or is for another model.
        ExportError: If it is of a kind that is not applied here, or not to such a model.
    """
    files = read_adapter(folder)
    if not _is_learnt(files):
        return Merged(model, find_tuned(files, model))
    if kind != "causal":
        raise ExportError(
            f"{files.name}: learnt tokens ({files.config['peft_type']}) are put before prompts of "
            f"causal language models, this is a {kind} model; export it without an adapter"
        )
    return Begun(model, find_learnt(files, model))


def put_beside(model: Any, folder: Path) -> AdapterName:
    """Let a model answer with an adapter, its own weights untouched.

    Raises:
        CheckpointError: As `apply_adapter`.
        ExportError: As `apply_adapter`; and if it changes the head, whose weights validation reads.
    """
    files = read_adapter(folder)
    if _is_learnt(files):
        learnt = find_learnt(files, model)
        begin_with(model, learnt.trained)
        return learnt
    tuned = find_tuned(files, model)
    head = model.get_output_embeddings()
    if any(model.get_submodule(pair.module) is head for pair in tuned.pairs):
        raise ExportError(
            f"{tuned.name}: the adapter changes the head, and validation reads the weights of the "
            "head that answers; merge it with PEFT's merge_and_unload, save the model and pass "
            "that as the reference, without --adapter"
        )
    add_beside(model, tuned)
    return tuned


def check_adaptable(checkpoint: Checkpoint, kind: ModelKind) -> None:
    """Refuse models that no adapter is applied to.

    Args:
        checkpoint: The model's.
        kind: What it is.

    Raises:
        ExportError: If it is one of these.
    """
    if checkpoint.factory:
        why = "this one is made by your own function; let the function apply the adapter"
    elif kind == "masked" or kind in SOURCED:
        why = f"this is a {kind} model; merge with PEFT's merge_and_unload, save and export that"
    else:
        return
    raise ExportError(f"--adapter: adapters are applied to decoder-only models, {why}")
