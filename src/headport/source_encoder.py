"""Sources of an encoder-decoder bundle: encoded once, then read by every step of their rows.

    ids [S], or features [F, frames] ─► encoder ─► cross keys and values, [1, heads, S, D] each
                                                          │
    token ids of n rows ─► backbone ◄── as they are where all rows read one source, else [n, …]

The encoder's graph gives what every cross-attention layer reads, so nothing of a source is computed
after its one run. Rows that share a source, such as beams and samples of one prompt, share its
arrays: the backbone broadcasts a batch of one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from headport.bundle import Bundle
from headport.cache_ports import FEATURES, SOURCE_IDS, SOURCE_MASK, is_cross
from headport.errors import BundleError
from headport.manifest import Manifest
from headport.session import SessionSettings, open_session

__all__ = [
    "Encoded",
    "Feeds",
    "RowSources",
    "SourceEncoder",
    "cross_names",
    "encoder_name",
    "example_sources",
]

Array = npt.NDArray[Any]
Feeds = Mapping[str, Array]

_EXAMPLE_LENGTHS = (5, 9)

_NOTHING: Feeds = {}


def encoder_name(manifest: Manifest) -> str:
    """Name of the graph that encodes sources.

    Raises:
        BundleError: If the manifest describes a source and has no such graph.
    """
    for name, graph in manifest.graphs.items():
        if graph.role == "encoder":
            return name
    raise BundleError(
        f"the manifest's graphs are {', '.join(manifest.graphs) or 'none'}, one of role encoder "
        "was expected, because it describes a source; export the checkpoint again"
    )


def cross_names(manifest: Manifest) -> tuple[str, ...]:
    """The backbone's inputs that hold cross keys and values; none of a decoder-only bundle."""
    return tuple(p.name for p in manifest.backbone.inputs if is_cross(p.name))


@dataclass(frozen=True, eq=False)
class Encoded:
    """One source as the backbone reads it."""

    arrays: Feeds  # cross input of the backbone → [1, heads, S, D]
    length: int  # S

    @cached_property
    def feeds(self) -> Feeds:
        """Inputs of a step whose rows all read this source: a batch of one."""
        return {**self.arrays, SOURCE_MASK: np.ones((1, self.length), np.int64)}


class SourceEncoder:
    """Runs the encoder. `runs` counts its executions.

    Args:
        bundle: Of an encoder-decoder model.
        settings: Threads and provider.

    Raises:
        BundleError: If the graph does not load, or does not give what the backbone reads.
    """

    def __init__(self, bundle: Bundle, settings: SessionSettings) -> None:
        manifest = bundle.manifest
        graph = manifest.graphs[encoder_name(manifest)]
        self.runs = 0
        self._session = open_session(bundle.path / graph.file, manifest.session_options, settings)
        self._names = cross_names(manifest)
        self._takes_ids = SOURCE_IDS in self._session.inputs
        if set(self._names) != set(self._session.outputs):
            odd = sorted({*self._names} ^ {*self._session.outputs})
            raise BundleError(
                f"{graph.file}: its outputs are not what the backbone reads ({', '.join(odd)}); "
                "export the checkpoint again"
            )

    @property
    def cpu_operators(self) -> dict[str, int]:
        """As `headport.runner.Runner.cpu_operators`, of the encoder alone."""
        return self._session.cpu_operators

    def encode(self, sources: Sequence[Array]) -> list[Encoded]:
        """Encode sources in one run.

        Args:
            sources: Token ids int64 [S] each, or features [F, frames] each, all of one shape.
        """
        lengths = [len(source) for source in sources]
        if self._takes_ids:
            found = self._session.run(_padded(sources, lengths))
        else:
            stacked = np.stack(sources).astype(self._session.dtype(FEATURES), copy=False)
            found = self._session.run({FEATURES: stacked})
            lengths = [found[self._names[0]].shape[2]] * len(sources)
        self.runs += 1
        return [
            Encoded({name: _part(found[name], row, length) for name in self._names}, length)
            for row, length in enumerate(lengths)
        ]


def _padded(sources: Sequence[Array], lengths: Sequence[int]) -> dict[str, Array]:
    ids = np.zeros((len(sources), max(lengths)), np.int64)
    mask = np.zeros_like(ids)
    for row, (source, length) in enumerate(zip(sources, lengths, strict=True)):
        ids[row, :length], mask[row, :length] = source, 1
    return {SOURCE_IDS: ids, SOURCE_MASK: mask}


def _part(array: Array, row: int, length: int) -> Array:
    # Of a run with one source the array itself; bound buffers must be contiguous.
    return np.ascontiguousarray(array[row : row + 1, :, :length])


class RowSources:
    """What the rows of one cache read beside their tokens; nothing where there is no encoder.

    Args:
        names: The backbone's cross inputs.
        count: Rows.
    """

    def __init__(self, names: Sequence[str], count: int) -> None:
        self._names = names
        self._held: list[Encoded | None] = [None] * count
        self._joined: tuple[list[Encoded | None], Feeds] = ([], _NOTHING)

    @property
    def count(self) -> int:
        """Rows."""
        return len(self._held)

    def put(self, row: int, encoded: Encoded | None) -> None:
        """Let a row read a source; None: no longer."""
        self._held[row] = encoded
        if encoded is None:
            self._joined = ([], _NOTHING)

    def fill(self, encoded: Encoded) -> None:
        """Let all rows read one source."""
        self._held = [encoded] * len(self._held)

    def copy(self, source: int, target: int) -> None:
        """Let a row read what another one reads."""
        self._held[target] = self._held[source]

    def reorder(self, source_rows: Sequence[int]) -> None:
        """Let each row b read what row `source_rows[b]` read."""
        self._held = [self._held[row] for row in source_rows]

    def feeds(self, rows: Sequence[int]) -> Feeds:
        """Inputs of a step of some rows, one and the same object for as long as nothing changes.

        A batch of one where all rows read one source; else each row's, padded to the longest. Rows
        without a source are allowed, beside others, as long as nobody reads what they give.

        Raises:
            BundleError: If none of the rows has a source.
        """
        if not self._names:
            return _NOTHING
        held = [self._held[row] for row in rows]
        sources = {id(each): each for each in held if each is not None}
        if not sources:
            raise BundleError(
                "an encoder-decoder bundle cannot continue tokens without a source; give one"
            )
        if len(sources) == 1:
            [encoded] = sources.values()
            return encoded.feeds
        before, feeds = self._joined
        if len(before) == len(held) and all(a is b for a, b in zip(before, held, strict=True)):
            return feeds
        self._joined = (held, self._join(held))
        return self._joined[1]

    def _join(self, held: Sequence[Encoded | None]) -> Feeds:
        longest = max(each.length for each in held if each is not None)
        mask = np.zeros((len(held), longest), np.int64)
        joined: dict[str, Array] = {SOURCE_MASK: mask}
        for row, each in enumerate(held):
            if each is None:
                continue
            mask[row, : each.length] = 1
            for name, array in each.arrays.items():
                if name not in joined:
                    shape = (len(held), array.shape[1], longest, array.shape[3])
                    joined[name] = np.zeros(shape, array.dtype)
                joined[name][row, :, : each.length] = array[0]
        return joined


def example_sources(manifest: Manifest, rng: np.random.Generator) -> list[Array]:
    """Two random sources of different lengths, for checks; none of a decoder-only bundle."""
    source = manifest.source
    if source is None:
        return []
    if source.vocab_size is not None:
        most = source.max_length or max(_EXAMPLE_LENGTHS)
        lengths = [min(length, most) for length in _EXAMPLE_LENGTHS]
        return [rng.integers(0, source.vocab_size, length) for length in lengths]
    ports = manifest.graphs[encoder_name(manifest)].inputs
    shape = next(port.shape for port in ports if port.name == FEATURES)[1:]
    sizes = [dim for dim in shape if isinstance(dim, int)]
    return [rng.standard_normal(sizes).astype(np.float32) for _ in _EXAMPLE_LENGTHS]
