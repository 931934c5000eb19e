"""What every runner offers, and what those have in common that run ONNX Runtime sessions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from headport.bundle import Bundle
from headport.cache_ports import is_past, present_name
from headport.errors import BundleError, PromptError
from headport.given_rows import open_given_rows
from headport.heads import HeadMethods, HeadOutput, HeadSessions, QuantisedLogits
from headport.learnt_prefix import LearntPrefix, read_prefix
from headport.manifest import Graph
from headport.session import SessionSettings, open_session
from headport.source_encoder import RowSources, SourceEncoder, cross_names

__all__ = ["Cache", "Runner", "SessionRunner", "check_step", "read_examples"]

Float32 = npt.NDArray[np.float32]
Int64 = npt.NDArray[np.int64]
Array = npt.NDArray[Any]


class Cache(Protocol):
    """Keys, values and states of one batch, owned by the runner that made it.

    A learnt prefix is in every row from the start; it counts neither as length nor as capacity.
    """

    @property
    def lengths(self) -> Int64:
        """Valid tokens per row so far, [B]."""
        ...

    @property
    def capacity(self) -> int:
        """Tokens a row may hold."""
        ...

    @property
    def sources(self) -> RowSources:
        """What each row reads beside its tokens."""
        ...

    def reorder(self, source_rows: Int64) -> None:
        """Let each row b hold what row `source_rows[b]` held, [B]; see `Runner.reorder`."""
        ...


class Runner(Protocol):
    """Executes a bundle. `runs` counts backbone executions."""

    runs: int

    def cpu_operators(self) -> dict[str, int]:
        """Operators that a GPU's provider left to the CPU: type → nodes; none on the CPU."""
        ...

    def new_cache(self, batch_size: int, capacity: int) -> Cache:
        """An empty cache for `batch_size` rows of up to `capacity` tokens each."""
        ...

    def forward(self, cache: Cache, token_ids: Int64, lengths: Int64) -> Float32:
        """Append tokens and return their hidden states.

        Args:
            cache: From `new_cache` of this runner; updated.
            token_ids: [B, T], each row's new tokens first, anything after them.
            lengths: [B], new tokens per row, 0…T; a row with 0 stays as it is.

        Returns:
            Hidden states after the final norm, [B, T, H]; entries past a row's length are
            unspecified.

        Raises:
            PromptError: If a row would outgrow the cache.
        """
        ...

    def reorder(self, cache: Cache, source_rows: Int64) -> None:
        """Let each row b of a cache hold what row `source_rows[b]` held.

        Args:
            cache: From `new_cache` of this runner; updated.
            source_rows: [B]; a row may be named more than once, or not at all.
        """
        ...

    def head(
        self, hidden_states: Float32, name: str = "lm", noise: Float32 | None = None
    ) -> HeadOutput:
        """Apply a head to hidden states [N, H].

        Args:
            hidden_states: [N, H].
            name: The head.
            noise: [N, V], added to the upper bounds by which candidates are picked; only for a
                head that gives candidates.
        """
        ...

    def full_logits(self, hidden_states: Float32, name: str = "lm") -> Float32:
        """All logits [N, V] of hidden states [N, H], with the original weight if there is one."""
        ...

    def quantised(self, hidden_states: Float32, name: str = "lm") -> QuantisedLogits:
        """The quantised logits of a head that gives candidates."""
        ...

    def rescored_logits(self, hidden_states: Float32, name: str = "lm") -> Float32:
        """Quantised logits [N, V] with the exact ones of the candidates written into them."""
        ...


class SessionRunner(HeadMethods):
    """What all ONNX Runtime targets share: sessions, cache specification, heads.

    `encoder` runs an encoder-decoder bundle's other half; None of a decoder-only bundle. `given`
    keeps the rows of embeddings that prompts hold; None where they are tokens alone.
    """

    def __init__(
        self, bundle: Bundle, settings: SessionSettings, heads: tuple[str, ...] | None
    ) -> None:
        manifest = bundle.manifest
        options = manifest.session_options
        backbone = manifest.backbone
        self._read_bundle(bundle)
        self._backbone = open_session(bundle.path / backbone.file, options, settings)
        # Only a decode step is recorded: heads are fed arrays of any number of rows, the encoder
        # sources of any length.
        unrecorded = replace(settings, capture=False)
        self.encoder = None if manifest.source is None else SourceEncoder(bundle, unrecorded)
        self._heads = HeadSessions(bundle, unrecorded, heads)
        self._check_ports(backbone)

    def _read_bundle(self, bundle: Bundle) -> None:
        """What is known without a session; also for runners that open none."""
        manifest = bundle.manifest
        self.runs = 0
        self._prefix: LearntPrefix = read_prefix(bundle)
        self.given = open_given_rows(manifest.backbone)
        self._hidden_size = manifest.model.hidden_size
        self._past = [p for p in manifest.backbone.inputs if is_past(p.name)]
        self._present = [present_name(p.name) for p in self._past]
        self._cross = cross_names(manifest)

    def cpu_operators(self) -> dict[str, int]:
        found = Counter(self._backbone.cpu_operators) + Counter(self._heads.cpu_operators())
        return dict(found + Counter(self.encoder.cpu_operators if self.encoder else {}))

    def _check_ports(self, backbone: Graph) -> None:
        declared = {p.name for p in backbone.inputs}
        if declared != set(self._backbone.inputs):
            odd = sorted(declared ^ set(self._backbone.inputs))
            raise BundleError(
                f"{backbone.file}: its inputs are not those of the manifest ({', '.join(odd)})"
            )

    def reorder(self, cache: Cache, source_rows: Int64) -> None:
        batch = len(cache.lengths)
        assert source_rows.shape == (batch,), "one source per row"
        assert source_rows.min() >= 0 and source_rows.max() < batch
        cache.reorder(source_rows)
        cache.sources.reorder(source_rows.tolist())

    def _cache_shape(self, shape: tuple[int | str, ...], batch: int, length: int) -> list[int]:
        named = {"batch": batch}
        return [d if isinstance(d, int) else named.get(d, length) for d in shape]


def check_step(cache: Cache, token_ids: Int64, new: Int64) -> None:
    """Refuse a step that a cache cannot take, before anything runs."""
    batch, width = token_ids.shape
    assert new.shape == cache.lengths.shape == (batch,), "one row of ids and one length per row"
    assert width >= 1 and new.min(initial=0) >= 0 and new.max(initial=0) <= width
    after = cache.lengths + new
    if (after > cache.capacity).any():
        row = int(np.argmax(after))
        raise PromptError(
            f"row {row} would hold {int(after[row])} tokens, "
            f"but the context was opened for {cache.capacity}"
        )


def read_examples(runner: Runner, cache: Cache, sources: Sequence[Array]) -> None:
    """Let row b of a new cache read source b, the first one again after the last.

    Args:
        runner: Of an encoder-decoder bundle.
        cache: From `new_cache` of this runner.
        sources: As `SourceEncoder.encode` takes them.
    """
    assert isinstance(runner, SessionRunner) and runner.encoder is not None
    encoded = runner.encoder.encode(sources)
    for row in range(cache.sources.count):
        cache.sources.put(row, encoded[row % len(encoded)])
