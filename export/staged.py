"""Running a bundle whose weights do not fit into memory: piece by piece, through ONNX Runtime.

What is run is known before anything is: the tokens are given. So the work is done twice: once with
a runner that only notes which steps are taken, and, after all steps have gone through each piece of
the graph in turn, once with a runner that hands out what came of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from headport.bundle import Bundle
from headport.cache_ports import is_past, present_name
from headport.export.segments import Segment, split_graph
from headport.head_parts import find_head
from headport.heads import HeadOutput, HeadSessions
from headport.progress import bar
from headport.runner import PortableRunner
from headport.session import Session, SessionSettings, open_session

__all__ = ["StagedRunner", "run_staged"]

Array = npt.NDArray[Any]
Float32 = npt.NDArray[np.float32]
Int64 = npt.NDArray[np.int64]
_T = TypeVar("_T")

_SEGMENT_BYTES = 96 << 20  # of weights that are in memory together
_FILE = ".segment.onnx"
# ONNX Runtime otherwise keeps a second, rearranged copy of every matrix.
_NO_COPIES = {"session.disable_prepacking": "1"}


@dataclass(frozen=True)
class _Step:
    """One run of the backbone: its inputs, and the cache it continues."""

    cache: Any
    values: dict[str, Array]


class StagedRunner(PortableRunner):
    """A runner of the portable form that notes steps, or hands out the results of noted ones."""

    def __init__(self, bundle: Bundle, results: Sequence[Float32] | None = None) -> None:
        manifest = bundle.manifest
        self._read_bundle(bundle)
        self.steps: list[_Step] = []
        self._manifest = manifest
        self._results = None if results is None else deque(results)
        self._backbone = _Declared(manifest.backbone.inputs)  # type: ignore[assignment]
        if results is not None:
            options = {**manifest.session_options, **_NO_COPIES}
            lean = replace(
                bundle, manifest=msgspec.structs.replace(manifest, session_options=options)
            )
            self._heads = HeadSessions(lean, SessionSettings(), None)

    def append(self, cache: Any, token_ids: Int64, valid: npt.NDArray[np.bool_]) -> Float32:
        mask = np.concatenate([cache.mask, valid.astype(np.int64)], axis=1)
        values = {"input_ids": np.where(valid, token_ids, 0), "attention_mask": mask}
        values |= {} if self.given is None else self.given.feeds(values["input_ids"])
        cache.mask, cache.lengths = mask, cache.lengths + valid.sum(axis=1)
        self.runs += 1
        if self._results is not None:
            return self._results.popleft()
        self.steps.append(_Step(cache, values))
        return np.zeros((*token_ids.shape, self._hidden_size), np.float32)

    def head(
        self, hidden_states: Float32, name: str = "lm", noise: Float32 | None = None
    ) -> HeadOutput:
        if self._results is not None:
            return super().head(hidden_states, name, noise)
        return HeadOutput(self._nothing(hidden_states, name), None)

    def full_logits(self, hidden_states: Float32, name: str = "lm") -> Float32:
        if self._results is not None:
            return super().full_logits(hidden_states, name)
        return self._nothing(hidden_states, name)

    def rows(self, hidden_states: Float32, token_ids: Int64, name: str = "lm") -> Float32:
        if self._results is not None:
            return super().rows(hidden_states, token_ids, name)
        return self._nothing(hidden_states, name)[:, token_ids]

    def _nothing(self, hidden_states: Float32, name: str) -> Float32:
        size = find_head(self._manifest, name).vocab_size
        return np.zeros((len(hidden_states), size), np.float32)


class _Declared:
    """Element types of ports as the manifest declares them, in the place of a session."""

    def __init__(self, ports: Any) -> None:
        self._dtypes = {p.name: {"float": "float32"}.get(p.dtype, p.dtype) for p in ports}

    def dtype(self, name: str) -> np.dtype[Any]:
        found: np.dtype[Any] = np.dtype(self._dtypes[name])
        return found


def run_staged(bundle: Bundle, work: Callable[[StagedRunner], _T]) -> tuple[_T, int]:
    """Do work that needs a runner, with one piece of the backbone in memory at a time.

    Args:
        bundle: A portable bundle.
        work: Called twice; must take the same steps whatever the runner gives.

    Returns:
        What `work` gave the second time, and the number of pieces.
    """
    recorder = StagedRunner(bundle)
    work(recorder)
    past = [port.name for port in recorder._past]
    results, pieces = _run(bundle, recorder.steps, past)
    return work(StagedRunner(bundle, results)), pieces


def _run(bundle: Bundle, steps: list[_Step], past: list[str]) -> tuple[list[Float32], int]:
    backbone = bundle.manifest.backbone
    caches = {id(step.cache): dict(zip(past, step.cache.past, strict=True)) for step in steps}
    segments = list(split_graph(bundle.path / backbone.file, _SEGMENT_BYTES))
    with bar(len(segments), "running the written files piece by piece", "piece") as progress:
        for number, (segment, model) in enumerate(segments):
            session = _open(bundle, segment, model)
            later = {name for s, _ in segments[number + 1 :] for name in s.inputs}
            for step in steps:
                _advance(session, step.values, caches[id(step.cache)], later)
            del session
            progress.update()
    hidden = [step.values["hidden_states"].astype(np.float32, copy=False) for step in steps]
    return hidden, len(segments)


def _open(bundle: Bundle, segment: Segment, model: bytes) -> Session:
    large = segment.data_bytes > 2 * _SEGMENT_BYTES
    options = {**bundle.manifest.session_options, **(_NO_COPIES if large else {})}
    file: Path = bundle.path / _FILE  # beside the data it reads; gone before the bundle is sealed
    try:
        file.write_bytes(model)
        return open_session(file, options)
    finally:
        file.unlink(missing_ok=True)


def _advance(
    session: Session,
    values: dict[str, Array],
    cache: dict[str, Array],
    later: set[str],
) -> None:
    feeds = {name: cache[name] if is_past(name) else values[name] for name in session.inputs}
    found = session.run(feeds)
    made = {present_name(name): name for name in cache}
    for name, value in found.items():
        if name in made:
            cache[made[name]] = value
        else:
            values[name] = value
    kept = later | {"hidden_states"}
    for name in [name for name in values if name not in kept]:
        del values[name]
