"""What an export knows of an adapter."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import msgspec

from headport.errors import ExportError
from headport.export.tuning.files import AdapterName
from headport.manifest import Model, Port, Prefix, Provenance

__all__ = ["Tuning", "origin_with"]


class Tuning:
    """What an export knows of an adapter; there may be none."""

    prefix: Prefix | None = None  # what the caches are to begin with

    def context_left(self, positions: int) -> int:
        """Tokens that a sequence may hold, where the model holds so many with a prefix.

        Raises:
            ExportError: If a prefix leaves none.
        """
        taken = 0 if self.prefix is None else self.prefix.tokens
        if positions <= taken:
            raise ExportError(
                f"{taken} learnt tokens leave nothing of a context of {positions}; train fewer"
            )
        return positions - taken

    def shortened(self, model: Model) -> Model:
        """The manifest's record of a model, with the context that is left of its own."""
        left = self.context_left(model.max_context)
        return msgspec.structs.replace(model, max_context=left)

    def write_prefix(self, folder: Path, inputs: Sequence[Port]) -> None:
        """Write what the caches begin with, for a backbone with these inputs.

        Raises:
            ExportError: If it is not what they keep.
        """

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


def origin_with(adapter: AdapterName, provenance: Provenance) -> Provenance:
    """Where weights come from that an adapter was applied to, given where they do without it."""
    name, sha256 = adapter.origin(provenance.checkpoint, provenance.sha256)
    return msgspec.structs.replace(provenance, checkpoint=name, sha256=sha256)
