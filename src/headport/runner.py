"""Runners execute a bundle: token ids in, hidden states and head outputs out.

One protocol, one implementation per kind of target. Everything that runs a bundle (export's
parity, the self-test, validation, generation) goes through here, so that what is proved is
what is shipped. Ids are the bundle's own; mapping back to original ids is the caller's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from headport.bundle import Bundle
from headport.cache_ports import cache_slots, is_state
from headport.device_runner import DeviceRunner
from headport.errors import BundleError, UsageError
from headport.heads import Candidates, HeadOutput, QuantisedLogits
from headport.in_place_slots import InPlaceSlots
from headport.lazy_memory import lazy_zeros
from headport.portable_slots import PortableSlots
from headport.providers import PROVIDERS, find_provider
from headport.session import Binding, SessionSettings
from headport.session_runner import Cache, Runner, SessionRunner, check_step
from headport.source_encoder import Feeds, RowSources
from headport.tuned import settings_of

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


def open_runner(
    bundle: Bundle, settings: SessionSettings | None = None, heads: tuple[str, ...] | None = None
) -> Runner:
    """Load a bundle's backbone and heads for the target it was lowered to.

    Raises:
        BundleError: If no runner of this release knows the target, or a graph does not load.
        UsageError: If the provider cannot run the target, or does not work on this machine.
    """
    target = bundle.manifest.target
    if target not in _RUNNERS:
        raise BundleError(f"{bundle.path}: no runner for target {target!r}")
    resolved = settings_of(bundle.manifest, settings)
    provider = find_provider(resolved.provider)
    if provider.key not in _PROVIDERS.get(target, tuple(PROVIDERS)):
        raise UsageError(
            f"{bundle.path} is lowered to {target}, which {provider.name} cannot run; lower the "
            "portable bundle it was made from for that provider"
        )
    return _RUNNERS[target](bundle, resolved, heads)


class _GrowingCache:
    """Keys, values and states as the last run returned them, and which slots hold tokens.

    The first `prefix` slots hold what every row begins with.
    """

    def __init__(self, sources: RowSources, capacity: int, past: list[Array], prefix: int) -> None:
        batch_size = sources.count
        self.sources = sources
        self.capacity = capacity
        self.lengths: Int64 = np.zeros(batch_size, np.int64)
        self.mask: Int64 = np.ones((batch_size, prefix), np.int64)
        self.past = past

    def reorder(self, source_rows: Int64) -> None:
        """See `headport.session_runner.Cache`."""
        self.past = [each[source_rows] for each in self.past]
        self.mask, self.lengths = self.mask[source_rows], self.lengths[source_rows]


class PortableRunner(SessionRunner):
    """Runs the portable form: attention_mask in, caches that grow by concatenation.

    Right padding leaves unused slots in the cache; the mask excludes them and positions count
    valid tokens only, so they change no answer. States are of one size from the start.
    """

    def new_cache(self, batch_size: int, capacity: int) -> _GrowingCache:
        first = self._prefix.tokens
        past = [
            self._prefix.rows(p.name, batch_size)
            if first
            else np.zeros(self._cache_shape(p.shape, batch_size, 0), self._backbone.dtype(p.name))
            for p in self._past
        ]
        return _GrowingCache(RowSources(self._cross, batch_size), capacity, past, first)

    def forward(self, cache: Cache, token_ids: Int64, lengths: Int64) -> Float32:
        assert isinstance(cache, _GrowingCache)
        check_step(cache, token_ids, lengths)
        width = token_ids.shape[1]
        return self.append(cache, token_ids, np.arange(width)[None, :] < lengths[:, None])

    def append(self, cache: Cache, token_ids: Int64, valid: npt.NDArray[np.bool_]) -> Float32:
        """As `forward`, with padding wherever `valid` [B, T] is False, also before the tokens."""
        assert isinstance(cache, _GrowingCache)
        mask = np.concatenate([cache.mask, valid.astype(np.int64)], axis=1)
        feeds: dict[str, Array] = {
            "input_ids": np.where(valid, token_ids, 0),
            "attention_mask": mask,
        }
        feeds |= {p.name: past for p, past in zip(self._past, cache.past, strict=True)}
        feeds |= cache.sources.feeds(range(len(mask)))
        found = self._run(feeds)
        # Only after the run, so that a run that failed leaves the cache as it was.
        cache.past = [found[name] for name in self._present]
        cache.mask, cache.lengths = mask, cache.lengths + valid.sum(axis=1)
        return found["hidden_states"].astype(np.float32, copy=False)

    def new_slots(self, count: int, capacity: int) -> PortableSlots:
        """Slots for sequences that come and go; see `headport.slots`."""
        first = self._prefix.tokens
        buffers = {
            p.name: self._prefix.fill(
                p.name,
                lazy_zeros(
                    self._cache_shape(p.shape, count, first + capacity),
                    self._backbone.dtype(p.name),
                ),
            )
            for p in self._past
        }
        sources = RowSources(self._cross, count)
        return PortableSlots(buffers, sources, capacity, first, self._run)

    def _run(self, feeds: dict[str, Array]) -> dict[str, Array]:
        given = {} if self.given is None else self.given.feeds(feeds["input_ids"])
        found = self._backbone.run(feeds | given)
        self.runs += 1
        return found


class _FixedCache:
    """Preallocated keys and values, bound once as input and output of the same session.

    Args:
        sources: What each row reads beside its tokens.
        capacity: Tokens per row.
        sets: Buffers by name of the cache input; two sets where there are states, which steps read
            and write in turn: one may write the next state before all that depends on the last one
            has been computed. Keys and values are the same arrays in both.
        prefix: First slots of each row, which hold what every row begins with.
    """

    def __init__(
        self, sources: RowSources, capacity: int, sets: tuple[dict[str, Array], ...], prefix: int
    ) -> None:
        batch_size = sources.count
        self.sources = sources
        self.given: Feeds = {}  # what the bindings read beside tokens
        self.capacity = capacity
        self.lengths: Int64 = np.zeros(batch_size, np.int64)
        self.sets = sets
        self.turn = 0  # the set that the next step reads
        self.seqlens_k = np.zeros(batch_size, np.int32)
        self.query_seqlens = np.zeros(batch_size, np.int32)
        self.prefix = prefix
        self.slots = cache_slots(prefix + capacity)
        self.total_sequence_length = np.array(self.slots, np.int32)
        # Looked for once: a step does nothing that takes longer for more layers.
        self._states = [(sets[0][name], sets[-1][name]) for name in sets[0] if is_state(name)]
        # By first row, rows and turn, of steps by one token.
        self.bindings: dict[tuple[int, int, int], tuple[Binding, Int64, Array]] = {}

    @property
    def buffers(self) -> dict[str, Array]:
        """What the next step reads."""
        return self.sets[self.turn]

    @property
    def next_turn(self) -> int:
        """The set that the next step writes."""
        return (self.turn + 1) % len(self.sets)

    def reorder(self, source_rows: Int64) -> None:
        """See `headport.session_runner.Cache`. In place: the buffers are bound."""
        longest = self.prefix + int(self.lengths.max(initial=0))
        for name, buffer in self.buffers.items():
            held = buffer if is_state(name) else buffer[:, :, :longest]
            held[...] = held[source_rows]
        self.lengths = self.lengths[source_rows]

    def written(self, rows: slice, after: Int64) -> None:
        """A step has written these rows."""
        self.lengths[rows] = after
        if len(after) == len(self.lengths):
            self.turn = self.next_turn
            return
        # All rows are read from one set, so what some of them wrote to the other is fetched back.
        for pair in self._states:
            pair[self.turn][rows] = pair[self.next_turn][rows]


class InPlaceRunner(SessionRunner):
    """Runs `ort-cpu`: GroupQueryAttention that writes into right-padded caches in place.

    States of recurrent layers are inputs and outputs of their own.

    `seqlens_k` [B] = tokens in the cache after the step, those of a learnt prefix included, minus
    one; `query_seqlens` [B] = new tokens of each row; `total_sequence_length` = slots of the cache.
    """

    def new_cache(self, batch_size: int, capacity: int) -> _FixedCache:
        return self._new_cache(batch_size, capacity, np.zeros)

    def _new_cache(
        self, batch_size: int, capacity: int, zeros: Callable[..., Array]
    ) -> _FixedCache:
        first = self._prefix.tokens
        buffers = {
            p.name: self._prefix.fill(
                p.name,
                zeros(
                    self._cache_shape(p.shape, batch_size, cache_slots(first + capacity)),
                    self._backbone.dtype(p.name),
                ),
            )
            for p in self._past
        }
        states = {name: np.zeros_like(b) for name, b in buffers.items() if is_state(name)}
        sets = (buffers, buffers | states) if states else (buffers,)
        return _FixedCache(RowSources(self._cross, batch_size), capacity, sets, first)

    def forward(self, cache: Cache, token_ids: Int64, lengths: Int64) -> Float32:
        assert isinstance(cache, _FixedCache)
        check_step(cache, token_ids, lengths)
        width, start = token_ids.shape[1], 0
        parts: list[Float32] = []
        while start < width:
            room = cache.slots - cache.prefix - int(cache.lengths.max(initial=0))
            stop = min(width, start + room)
            new = np.clip(lengths - start, 0, stop - start)
            parts.append(self._step(cache, 0, token_ids[:, start:stop], new))
            start = stop
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)

    def new_slots(self, count: int, capacity: int) -> InPlaceSlots:
        """Slots for sequences that come and go; see `headport.slots`."""
        cache = self._new_cache(count, capacity, lazy_zeros)
        arrays = {id(b): b.nbytes for buffers in cache.sets for b in buffers.values()}
        return InPlaceSlots(cache, sum(arrays.values()), partial(self._step, cache))

    def _step(self, cache: _FixedCache, first: int, token_ids: Int64, new: Int64) -> Float32:
        """One run of rows `first` … `first + n - 1`: ids [n, T], new tokens [n]."""
        count, width = token_ids.shape
        rows = slice(first, first + count)
        given = cache.sources.feeds(range(first, first + count))
        if given is not cache.given:
            # Bound arrays would be kept for as long as the cache.
            cache.bindings.clear()
            cache.given = given
        valid = np.arange(width)[None, :] < new[:, None]
        fed: Int64 = np.where(valid, token_ids, 0)
        # A step by one token is bound once; one by a row of embeddings has rows of its own.
        usual = width == 1 and (self.given is None or fed.min() >= 0)
        bound = cache.bindings.get((first, count, cache.turn)) if usual else None
        if bound is None:
            bound = self._bind(cache, rows, fed)
            if usual:
                cache.bindings[first, count, cache.turn] = bound
        binding, ids, hidden = bound
        np.copyto(ids, fed if self.given is None else np.maximum(fed, 0))
        after = cache.lengths[rows] + new
        cache.query_seqlens[rows] = new
        # A row that holds nothing must still name a token; without a query nothing is written.
        cache.seqlens_k[rows] = np.maximum(cache.prefix + after, 1) - 1
        binding.run()
        self.runs += 1
        cache.written(rows, after)
        return hidden.astype(np.float32, copy=True)

    def _bind(self, cache: _FixedCache, rows: slice, fed: Int64) -> tuple[Binding, Int64, Array]:
        given = {} if self.given is None else self.given.feeds(fed)
        ids = np.zeros(fed.shape, np.int64)
        shape = (*fed.shape, self._hidden_size)
        hidden = np.zeros(shape, self._backbone.dtype("hidden_states"))
        binding = self._backbone.bind()
        scalars: dict[str, Array] = {
            **given,
            "input_ids": ids,
            "seqlens_k": cache.seqlens_k[rows],
            "query_seqlens": cache.query_seqlens[rows],
            "total_sequence_length": cache.total_sequence_length,
            **cache.given,
        }
        # Neighbouring rows are an array themselves. What is read and written in place must be one
        # object on both sides, also where it is such a part.
        parts = {id(b): b[rows] for buffers in cache.sets for b in buffers.values()}
        reads, writes = cache.buffers, cache.sets[cache.next_turn]
        for name in self._backbone.inputs:
            binding.input(name, scalars[name] if name in scalars else parts[id(reads[name])])
        binding.output("hidden_states", hidden)
        for past, present in zip(self._past, self._present, strict=True):
            binding.output(present, parts[id(writes[past.name])])
        return binding, ids, hidden


def _device_runner(
    bundle: Bundle, settings: SessionSettings, heads: tuple[str, ...] | None
) -> Runner:
    backbone = bundle.manifest.backbone
    if any(port.name == "attention_mask" for port in backbone.inputs):  # it stayed portable
        return PortableRunner(bundle, settings, heads)
    return DeviceRunner(bundle, settings, heads)


def _cpu_runner(bundle: Bundle, settings: SessionSettings, heads: tuple[str, ...] | None) -> Runner:
    if any(port.name == "query_seqlens" for port in bundle.manifest.backbone.inputs):
        return InPlaceRunner(bundle, settings, heads)
    return DeviceRunner(bundle, settings, heads)  # lowered for an older ONNX Runtime


_RUNNERS: dict[str, Callable[[Bundle, SessionSettings, tuple[str, ...] | None], Runner]] = {
    "portable": PortableRunner,
    "ort-cpu": _cpu_runner,
    "ort-cuda": _device_runner,
    "tensorrt": PortableRunner,  # the files, on ONNX Runtime; a plan has a runner of its own
}
_PROVIDERS = {"ort-cpu": ("cpu",), "tensorrt": ("cpu",)}  # targets that not every provider can run
