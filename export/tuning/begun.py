"""Learnt tokens before every prompt: what the caches begin with, and how they were trained."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from headport.errors import BundleError, ExportError
from headport.export.tuning.beginnings import begin_with, read_before
from headport.export.tuning.learnt import LearntTokens
from headport.export.tuning.tuning import Tuning, origin_with
from headport.learnt_prefix import PREFIX_FILE, check_prefix
from headport.manifest import Port, Prefix, Provenance

__all__ = ["Begun"]


class Begun(Tuning):
    """A model whose caches begin with learnt tokens; its weights stay as they are."""

    def __init__(self, model: Any, learnt: LearntTokens) -> None:
        self._model = model
        self._learnt = learnt
        self.prefix = Prefix(kind=learnt.kind, tokens=learnt.tokens)

    @contextmanager
    def apart(self) -> Iterator[None]:
        """See `Tuning`."""
        if self._learnt.embeddings is not None:
            with read_before(self._model, self._learnt.embeddings):
                yield
            return
        hook = begin_with(self._model, self._learnt.trained)
        try:
            yield
        finally:
            hook.remove()

    def write_prefix(self, folder: Path, inputs: Sequence[Port]) -> None:
        """See `Tuning`."""
        tensors = {
            f"past_key_values.{layer}.{kind}": part.numpy()
            for layer, pair in enumerate(self._learnt.layers)
            for kind, part in zip(("key", "value"), pair, strict=True)
        }
        try:
            check_prefix(tensors, inputs, self._learnt.tokens, self._learnt.name)
        except BundleError as error:
            raise ExportError(f"{error}; export the model without an adapter") from error
        save_file(
            {name: np.ascontiguousarray(t) for name, t in tensors.items()}, folder / PREFIX_FILE
        )

    def origin(self, provenance: Provenance) -> Provenance:
        """See `Tuning`."""
        return origin_with(self._learnt, provenance)

    def report(self, provenance: Provenance) -> dict[str, Any]:
        """See `Tuning`."""
        return {"adapter": self._learnt.facts(provenance.sha256)}
