"""Runners execute a bundle: token ids in, hidden states and head outputs out.

One protocol, one implementation per kind of target. Everything that runs a bundle (export's
parity, the self-test, validation, generation) goes through here, so that what is proved is
what is shipped. Ids are the bundle's own; mapping back to original ids is the caller's.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from headport.bundle import Bundle
from headport.cache_ports import is_past, is_state, present_name
from headport.errors import BundleError, PromptError
from headport.heads import Candidates, HeadOutput, HeadSessions, QuantisedLogits
from headport.manifest import Graph
from headport.session import Binding, SessionSettings, open_session

__all__ = [
    "Cache",
    "Candidates",
    "HeadOutput",
    "QuantisedLogits",
    "Runner",
    "open_runner",
]

Float32 = npt.NDArray[np.float32]
Int64 = npt.NDArray[np.int64]
Array = npt.NDArray[Any]


class Cache(Protocol):
    """Keys, values and states of one batch, owned by the runner that made it."""

    @property
    def lengths(self) -> Int64:
        """Valid tokens per row so far, [B]."""
        ...

    @property
    def capacity(self) -> int:
        """Tokens a row may hold."""
        ...


class Runner(Protocol):
    """Executes a bundle. `runs` counts backbone executions."""

    runs: int

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


def open_runner(
    bundle: Bundle, settings: SessionSettings | None = None, heads: tuple[str, ...] | None = None
) -> Runner:
    """Load a bundle's backbone and heads for the target it was lowered to.

    Raises:
        BundleError: If no runner of this release knows the target, or a graph does not load.
    """
    target = bundle.manifest.target
    if target not in _RUNNERS:
        raise BundleError(f"{bundle.path}: no runner for target {target!r}")
    return _RUNNERS[target](bundle, settings or SessionSettings(), heads)


class _SessionRunner:
    """What all ONNX Runtime targets share: sessions, cache specification, heads."""

    def __init__(
        self, bundle: Bundle, settings: SessionSettings, heads: tuple[str, ...] | None
    ) -> None:
        manifest = bundle.manifest
        options = manifest.session_options
        backbone = next(g for g in manifest.graphs.values() if g.role == "backbone")
        self.runs = 0
        self._backbone = open_session(bundle.path / backbone.file, options, settings)
        self._hidden_size = manifest.model.hidden_size
        self._past = [p for p in backbone.inputs if is_past(p.name)]
        self._present = [present_name(p.name) for p in self._past]
        self._heads = HeadSessions(bundle, settings, heads)
        self._check_ports(backbone)

    def _check_ports(self, backbone: Graph) -> None:
        declared = {p.name for p in backbone.inputs}
        if declared != set(self._backbone.inputs):
            odd = sorted(declared ^ set(self._backbone.inputs))
            raise BundleError(
                f"{backbone.file}: its inputs are not those of the manifest ({', '.join(odd)})"
            )

    def head(
        self, hidden_states: Float32, name: str = "lm", noise: Float32 | None = None
    ) -> HeadOutput:
        return self._heads.head(hidden_states, name, noise)

    def full_logits(self, hidden_states: Float32, name: str = "lm") -> Float32:
        return self._heads.full_logits(hidden_states, name)

    def quantised(self, hidden_states: Float32, name: str = "lm") -> QuantisedLogits:
        return self._heads.quantised(hidden_states, name)

    def rescored_logits(self, hidden_states: Float32, name: str = "lm") -> Float32:
        return self._heads.rescored_logits(hidden_states, name)

    def _cache_shape(self, shape: tuple[int | str, ...], batch: int, length: int) -> list[int]:
        named = {"batch": batch}
        return [d if isinstance(d, int) else named.get(d, length) for d in shape]


def _check_step(cache: Cache, token_ids: Int64, new: Int64) -> None:
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


class _GrowingCache:
    """Keys, values and states as the last run returned them, and which slots hold tokens."""

    def __init__(self, batch_size: int, capacity: int, past: list[Array]) -> None:
        self.capacity = capacity
        self.lengths: Int64 = np.zeros(batch_size, np.int64)
        self.mask: Int64 = np.zeros((batch_size, 0), np.int64)
        self.past = past


class PortableRunner(_SessionRunner):
    """Runs the portable form: attention_mask in, caches that grow by concatenation.

    Right padding leaves unused slots in the cache; the mask excludes them and positions count
    valid tokens only, so they change no answer. States are of one size from the start.
    """

    def new_cache(self, batch_size: int, capacity: int) -> _GrowingCache:
        past = [
            np.zeros(self._cache_shape(p.shape, batch_size, 0), self._backbone.dtype(p.name))
            for p in self._past
        ]
        return _GrowingCache(batch_size, capacity, past)

    def forward(self, cache: Cache, token_ids: Int64, lengths: Int64) -> Float32:
        assert isinstance(cache, _GrowingCache)
        _check_step(cache, token_ids, lengths)
        width = token_ids.shape[1]
        valid = (np.arange(width)[None, :] < lengths[:, None]).astype(np.int64)
        mask = np.concatenate([cache.mask, valid], axis=1)
        feeds: dict[str, Array] = {
            "input_ids": np.where(valid == 1, token_ids, 0),
            "attention_mask": mask,
        }
        feeds |= {p.name: past for p, past in zip(self._past, cache.past, strict=True)}
        found = self._backbone.run(feeds)
        self.runs += 1
        # Only after the run, so that a run that failed leaves the cache as it was.
        cache.past = [found[name] for name in self._present]
        cache.mask, cache.lengths = mask, cache.lengths + lengths
        return found["hidden_states"].astype(np.float32, copy=False)


# The operator wants room for a chunk's padding behind every row, also behind a full one. With this
# many slots more than tokens, a chunk never has to be cut narrower than that.
_SPARE_SLOTS = 64


class _FixedCache:
    """Preallocated keys and values, bound once as input and output of the same session.

    Args:
        batch_size: Rows.
        capacity: Tokens per row.
        buffers: By name of the cache input; two sets where there are states, which steps read and
            write in turn: one may write the next state before all that depends on the last one has
            been computed. Keys and values are the same arrays in both.
    """

    def __init__(
        self, batch_size: int, capacity: int, buffers: tuple[dict[str, Array], ...]
    ) -> None:
        self.capacity = capacity
        self.lengths: Int64 = np.zeros(batch_size, np.int64)
        self.buffers = buffers
        self.turn = 0  # the set that the next step reads
        self.seqlens_k = np.zeros(batch_size, np.int32)
        self.query_seqlens = np.zeros(batch_size, np.int32)
        self.slots = _slots(capacity)
        self.total_sequence_length = np.array(self.slots, np.int32)
        self.bindings: dict[tuple[int, int], tuple[Binding, Int64, Array]] = {}  # by T and turn

    @property
    def next_turn(self) -> int:
        """The set that the next step writes."""
        return (self.turn + 1) % len(self.buffers)


def _slots(capacity: int) -> int:
    return capacity + min(capacity, _SPARE_SLOTS)


class InPlaceRunner(_SessionRunner):
    """Runs `ort-cpu`: GroupQueryAttention that writes into right-padded caches in place.

    States of recurrent layers are inputs and outputs of their own.

    `seqlens_k` [B] = tokens in the cache after the step, minus one; `query_seqlens` [B] = new
    tokens of each row; `total_sequence_length` = slots of the cache.
    """

    def new_cache(self, batch_size: int, capacity: int) -> _FixedCache:
        buffers = {
            p.name: np.zeros(
                self._cache_shape(p.shape, batch_size, _slots(capacity)),
                self._backbone.dtype(p.name),
            )
            for p in self._past
        }
        states = {name: np.zeros_like(b) for name, b in buffers.items() if is_state(name)}
        sets = (buffers, buffers | states) if states else (buffers,)
        return _FixedCache(batch_size, capacity, sets)

    def forward(self, cache: Cache, token_ids: Int64, lengths: Int64) -> Float32:
        assert isinstance(cache, _FixedCache)
        _check_step(cache, token_ids, lengths)
        width, start = token_ids.shape[1], 0
        parts: list[Float32] = []
        while start < width:
            room = cache.slots - int(cache.lengths.max(initial=0))
            stop = min(width, start + room)
            new = np.clip(lengths - start, 0, stop - start)
            parts.append(self._step(cache, token_ids[:, start:stop], new))
            start = stop
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)

    def _step(self, cache: _FixedCache, token_ids: Int64, new: Int64) -> Float32:
        width = token_ids.shape[1]
        bound = cache.bindings.get((width, cache.turn))
        binding, ids, hidden = bound or self._bind(cache, width)
        valid = np.arange(width)[None, :] < new[:, None]
        np.copyto(ids, np.where(valid, token_ids, 0))
        after = cache.lengths + new
        cache.query_seqlens[:] = new
        # A row that holds nothing must still name a token; without a query nothing is written.
        cache.seqlens_k[:] = np.maximum(after, 1) - 1
        binding.run()
        self.runs += 1
        cache.lengths = after
        cache.turn = cache.next_turn
        return hidden.astype(np.float32, copy=True)

    def _bind(self, cache: _FixedCache, width: int) -> tuple[Binding, Int64, Array]:
        batch = len(cache.lengths)
        ids = np.zeros((batch, width), np.int64)
        hidden_size = self._hidden_size
        hidden = np.zeros((batch, width, hidden_size), self._backbone.dtype("hidden_states"))
        binding = self._backbone.bind()
        scalars: dict[str, Array] = {
            "input_ids": ids,
            "seqlens_k": cache.seqlens_k,
            "query_seqlens": cache.query_seqlens,
            "total_sequence_length": cache.total_sequence_length,
        }
        for name in self._backbone.inputs:
            binding.input(
                name, scalars[name] if name in scalars else cache.buffers[cache.turn][name]
            )
        binding.output("hidden_states", hidden)
        for past, present in zip(self._past, self._present, strict=True):
            binding.output(present, cache.buffers[cache.next_turn][past.name])
        if width == 1:  # decode: bound once, reused by every step
            cache.bindings[width, cache.turn] = (binding, ids, hidden)
        return binding, ids, hidden


_RUNNERS: dict[str, type[PortableRunner] | type[InPlaceRunner]] = {
    "portable": PortableRunner,
    "ort-cpu": InPlaceRunner,
}
