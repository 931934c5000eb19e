"""An adapter applied to its model: merged into the weights, or beside them, as it was trained.

The export writes the merged form and holds it against the form beside, which shares no arithmetic
with it: a transposed product, a wrong sign or a forgotten layer shows in the parity.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import msgspec
import torch

from headport.errors import ExportError
from headport.export.checkpoint import SOURCED, Checkpoint, ModelKind
from headport.export.tuning.files import read_adapter
from headport.export.tuning.lora import LowRank, Tuned, find_tuned, is_transposed
from headport.manifest import Provenance

__all__ = ["Merged", "Tuning", "check_adaptable", "merge_adapter", "put_beside"]


class Tuning:
    """What an export knows of an adapter; there may be none."""

    def apart(self) -> AbstractContextManager[None]:
        """The model as it was trained: weights untouched, the adapter beside them. Once."""
        return nullcontext()

    def origin(self, provenance: Provenance) -> Provenance:
        """Where the exported weights come from, given where the model's own do."""
        return provenance

    def report(self, provenance: Provenance) -> dict[str, Any]:
        """For the manifest's stage, given where the model's own weights come from."""
        del provenance
        return {}


class Merged(Tuning):
    """A model with an adapter merged into it, and the way back for as long as it is needed."""

    def __init__(self, model: Any, tuned: Tuned) -> None:
        """Merge: every changed layer gets a weight of its own, so a tied one is tied no more."""
        self._tuned = tuned
        self._model = model
        self._own: dict[str, torch.nn.Parameter] = {}
        _take_whole(model, tuned)
        for pair in tuned.pairs:
            layer = model.get_submodule(pair.module)
            self._own[pair.module] = layer.weight
            product = pair.product()
            merged = layer.weight.detach() + (product.T if is_transposed(layer) else product)
            layer.weight = torch.nn.Parameter(merged, requires_grad=False)

    @contextmanager
    def apart(self) -> Iterator[None]:
        """See `Tuning`. The untouched weights' memory is given back afterwards."""
        own, self._own = self._own, {}
        merged = {name: self._model.get_submodule(name).weight for name in own}
        with ExitStack() as stack:
            self._put(own)
            stack.callback(self._put, merged)
            for pair in self._tuned.pairs:
                stack.callback(_hook(self._model, pair).remove)
            yield

    def _put(self, weights: dict[str, torch.nn.Parameter]) -> None:
        for name, weight in weights.items():
            self._model.get_submodule(name).weight = weight

    def origin(self, provenance: Provenance) -> Provenance:
        """See `Tuning`."""
        name, sha256 = self._tuned.origin(provenance.checkpoint, provenance.sha256)
        return msgspec.structs.replace(provenance, checkpoint=name, sha256=sha256)

    def report(self, provenance: Provenance) -> dict[str, Any]:
        """See `Tuning`."""
        return {"adapter": self._tuned.facts(provenance.sha256)}


def merge_adapter(model: Any, folder: Path) -> Merged:
    """Read an adapter, hold it against the model and merge it in float32.

    Raises:
        CheckpointError: If it cannot be read, is incomplete or is for another model.
        ExportError: If it is of a kind that cannot be merged here.
    """
    return Merged(model, find_tuned(read_adapter(folder), model))


def put_beside(model: Any, folder: Path) -> Tuned:
    """Let a model answer with an adapter, its own weights untouched.

    Raises:
        CheckpointError: As `merge_adapter`.
        ExportError: As `merge_adapter`; and if it changes the head, whose weights validation reads.
    """
    tuned = find_tuned(read_adapter(folder), model)
    head = model.get_output_embeddings()
    if any(model.get_submodule(pair.module) is head for pair in tuned.pairs):
        raise ExportError(
            f"{tuned.name}: the adapter changes the head, and validation reads the weights of the "
            "head that answers; merge it with PEFT's merge_and_unload, save the model and pass "
            "that as the reference, without --adapter"
        )
    _take_whole(model, tuned)
    for pair in tuned.pairs:
        _hook(model, pair)
    return tuned


def check_adaptable(checkpoint: Checkpoint, kind: ModelKind) -> None:
    """Refuse models that no adapter is merged into.

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
    raise ExportError(f"--adapter: adapters are merged into decoder-only models, {why}")


def _take_whole(model: Any, tuned: Tuned) -> None:
    for name, tensor in tuned.whole.items():
        module, _, parameter = name.rpartition(".")
        own = torch.nn.Parameter(tensor, requires_grad=False)
        setattr(model.get_submodule(module), parameter, own)


def _hook(model: Any, pair: LowRank) -> Any:
    def add(layer: torch.nn.Module, given: Any, output: torch.Tensor) -> torch.Tensor:
        return output + pair.beside(layer, given[0])

    return model.get_submodule(pair.module).register_forward_hook(add)
