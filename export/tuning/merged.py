"""A LoRA adapter merged into the weights of its model, or added beside them, as it was trained."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from headport.export.tuning.lora import LowRank, Tuned, is_transposed
from headport.export.tuning.tuning import Tuning, origin_with
from headport.manifest import Provenance

__all__ = ["Merged", "add_beside"]


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
        return origin_with(self._tuned, provenance)

    def report(self, provenance: Provenance) -> dict[str, Any]:
        """See `Tuning`."""
        return {"adapter": self._tuned.facts(provenance.sha256)}


def add_beside(model: Any, tuned: Tuned) -> None:
    """Let a model answer with an adapter, its own weights untouched."""
    _take_whole(model, tuned)
    for pair in tuned.pairs:
        _hook(model, pair)


def _take_whole(model: Any, tuned: Tuned) -> None:
    for name, tensor in tuned.whole.items():
        module, _, parameter = name.rpartition(".")
        own = torch.nn.Parameter(tensor, requires_grad=False)
        setattr(model.get_submodule(module), parameter, own)


def _hook(model: Any, pair: LowRank) -> Any:
    def add(layer: torch.nn.Module, given: Any, output: torch.Tensor) -> torch.Tensor:
        return output + pair.beside(layer, given[0])

    return model.get_submodule(pair.module).register_forward_hook(add)
