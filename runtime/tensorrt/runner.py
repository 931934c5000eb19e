"""The runner of plans: as the portable one, with caches that stay on the device.

A step's new keys and values are the outputs that become the next step's inputs; only token ids, the
mask, hidden states and logits travel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from headport.bundle import Bundle
from headport.cache_ports import is_past, present_name
from headport.engines import CARRIES_CODE, MERGED, STRIPPED, EngineRecord, read_engines
from headport.errors import BundleError, PromptError, RequestError
from headport.heads import HeadOutput, QuantisedLogits
from headport.runtime.engine.backends import load_backend
from headport.runtime.tensorrt.device import CudaDevice, Device, Memory
from headport.runtime.tensorrt.guard import require_usable
from headport.runtime.tensorrt.plan import OnDevice, Plan
from headport.session_runner import Cache, check_step
from headport.source_encoder import RowSources

__all__ = ["PlanRunner", "open_plans"]

Float32 = npt.NDArray[np.float32]
Int64 = npt.NDArray[np.int64]
Array = npt.NDArray[Any]


def open_plans(
    bundle: Bundle, heads: tuple[str, ...] | None = None, *, capture: bool = False
) -> PlanRunner:
    """Open a bundle's plans on this machine's GPU.

    Args:
        bundle: From `headport engine`.
        heads: Heads to open; None: all.
        capture: Record executions as CUDA graphs, where the backend can.

    Raises:
        BundleError: If the bundle carries no plan of its own for the backbone or a head.
        NoGpuError: If there is no GPU; nothing of TensorRT has been touched then.
        EngineError: If the backend, its version or the GPU is not the plans', or one does not load.
    """
    bundle.require_no_prefix("running its plans", "lower it to ort-cuda or ort-cpu")
    records = _records(bundle, heads)
    for record in records.values():
        require_usable(bundle, record)
    backends = sorted({record.backend for record in records.values()})
    if len(backends) != 1:
        raise BundleError(f"{bundle.path}: plans of {' and '.join(backends)} do not run together")
    trt, device = load_backend(backends[0]), CudaDevice()

    def load(record: EngineRecord) -> Plan:
        graph = bundle.file(bundle.manifest.graphs[record.graph].file)
        return Plan(
            trt,
            bundle.file(record.plan),
            device,
            capture=capture,
            carries_code=CARRIES_CODE in record.flags,
            weights=graph if STRIPPED in record.flags else None,
        )

    return PlanRunner(bundle, device, records, load)


def _records(bundle: Bundle, heads: tuple[str, ...] | None) -> dict[str, EngineRecord]:
    manifest, found = bundle.manifest, read_engines(bundle)
    if MERGED in found:
        raise BundleError(
            f"{bundle.path}: its plan is merged, so no head can be applied to other hidden "
            "states; build it without --merged"
        )
    names = heads if heads is not None else tuple(manifest.heads)
    wanted = [manifest.backbone_name]
    wanted += [manifest.heads[name].graph for name in names]
    missing = [name for name in wanted if name not in found]
    if missing:
        raise BundleError(
            f"{bundle.path}: no plan of {', '.join(missing)}; build them with `headport engine`"
        )
    return {name: found[name] for name in wanted}


class _GrowingCache:
    """Keys and values on the device, and which slots hold tokens."""

    def __init__(self, batch_size: int, capacity: int, past: dict[str, OnDevice]) -> None:
        self.capacity = capacity
        self.sources = RowSources((), batch_size)
        self.lengths: Int64 = np.zeros(batch_size, np.int64)
        self.mask: Int64 = np.zeros((batch_size, 0), np.int64)
        self.past = past

    def reorder(self, source_rows: Int64) -> None:
        """Refused: nothing here moves rows of a cache that lies on the device."""
        del source_rows
        raise RequestError(
            "beam search was asked for, which moves rows of the caches; TensorRT plans keep theirs "
            "on the device and cannot yet, use num_beams = 1"
        )


class PlanRunner:
    """Runs the plans of a backbone and of heads that give all logits. See `headport.runner`."""

    def __init__(
        self,
        bundle: Bundle,
        device: Device,
        records: dict[str, EngineRecord],
        load: Callable[[EngineRecord], Plan],
    ) -> None:
        manifest = bundle.manifest
        self.runs = 0
        self._device = device
        name = manifest.backbone_name
        self._backbone = load(records[name])
        self._past = [p for p in manifest.graphs[name].inputs if is_past(p.name)]
        self._heads = {
            head_name: load(records[head.graph])
            for head_name, head in manifest.heads.items()
            if head.graph in records
        }
        self._sizes = {name: head.vocab_size for name, head in manifest.heads.items()}
        self._largest_batch = self._backbone.largest("input_ids")[0]

    def cpu_operators(self) -> dict[str, int]:
        return {}

    def new_cache(self, batch_size: int, capacity: int) -> _GrowingCache:
        if batch_size > self._largest_batch:
            raise PromptError(
                f"a batch of {batch_size} was asked for, the plan was built for up to "
                f"{self._largest_batch}"
            )
        past = {}
        for port in self._past:
            shape = tuple(
                d if isinstance(d, int) else {"batch": batch_size}.get(d, 0) for d in port.shape
            )
            memory = Memory(self._device)
            memory.reserve(0)
            past[port.name] = OnDevice(memory, shape, self._backbone.dtype(port.name))
        return _GrowingCache(batch_size, capacity, past)

    def forward(self, cache: Cache, token_ids: Int64, lengths: Int64) -> Float32:
        assert isinstance(cache, _GrowingCache)
        check_step(cache, token_ids, lengths)
        valid = np.arange(token_ids.shape[1])[None, :] < lengths[:, None]
        parts: list[Float32] = []
        start = 0
        while start < token_ids.shape[1]:
            end = start + self._step(cache, token_ids.shape[1] - start)
            parts.append(self._append(cache, token_ids[:, start:end], valid[:, start:end]))
            start = end
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)

    def _step(self, cache: _GrowingCache, left: int) -> int:
        """Tokens that one run takes behind those that are there."""
        batch, past = cache.mask.shape
        held = {name: array.shape for name, array in list(cache.past.items())[:1]}
        for count in range(left, 0, -1):
            shapes = {"input_ids": (batch, count), "attention_mask": (batch, past + count)}
            if self._backbone.fits(shapes | held):
                return count
        return left  # no profile takes any; the run says so

    def _append(self, cache: _GrowingCache, ids: Int64, valid: npt.NDArray[np.bool_]) -> Float32:
        mask = np.concatenate([cache.mask, valid.astype(np.int64)], axis=1)
        feeds: dict[str, Array | OnDevice] = {
            "input_ids": np.where(valid, ids, 0),
            "attention_mask": mask,
        }
        feeds |= cache.past
        found = self._backbone.run(feeds)
        self.runs += 1
        hidden = found["hidden_states"].numpy(self._device)
        # Only after the run, so that a run that failed leaves the cache as it was.
        cache.past = {port.name: found[present_name(port.name)] for port in self._past}
        cache.mask, cache.lengths = mask, cache.lengths + valid.sum(axis=1)
        return hidden.astype(np.float32, copy=False)

    def reorder(self, cache: Cache, source_rows: Int64) -> None:
        cache.reorder(source_rows)

    def head(
        self, hidden_states: Float32, name: str = "lm", noise: Float32 | None = None
    ) -> HeadOutput:
        assert noise is None, "a head that gives all logits picks nothing"
        return HeadOutput(self.full_logits(hidden_states, name), None)

    def full_logits(self, hidden_states: Float32, name: str = "lm") -> Float32:
        if name not in self._heads:
            known = ", ".join(self._heads) or "none"
            raise BundleError(f"no head {name!r} is loaded (loaded: {known})")
        if not len(hidden_states):
            return np.zeros((0, self._sizes[name]), np.float32)
        plan = self._heads[name]
        step = plan.largest("hidden_states")[0]
        parts = [
            plan.run({"hidden_states": hidden_states[start : start + step]})["logits"]
            .numpy(self._device)
            .astype(np.float32, copy=False)
            for start in range(0, len(hidden_states), step)
        ]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def quantised(self, hidden_states: Float32, name: str = "lm") -> QuantisedLogits:
        del hidden_states
        raise BundleError(f"head {name!r} gives logits, candidates were expected")

    def rescored_logits(self, hidden_states: Float32, name: str = "lm") -> Float32:
        del hidden_states
        raise BundleError(f"head {name!r} gives logits, candidates were expected")
