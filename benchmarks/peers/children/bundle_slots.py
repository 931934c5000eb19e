"""A bundle of headport with many sequences at once: `bundle_slots.py FOLDER THREADS [unpacked]`.

`unpacked` keeps ONNX Runtime from storing matrices in another order for its kernels; with FOLDER
`-` nothing but the smallest of sessions is opened.
"""

from __future__ import annotations

import inspect
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx_ir as ir
from loop import serve

from headport.bundle import Bundle
from headport.runner import open_runner
from headport.runtime import Generator
from headport.session import SessionSettings, library_version, open_session
from headport.slots import Slots, open_slots

_EMPTY = "-"
_CHUNK: int = inspect.signature(Generator).parameters["prefill_chunk"].default
_NO_PACKING = {"session.disable_prepacking": "1"}


class Model:
    """Backbone and head over slots, as the scheduler of `Generator` uses them."""

    def __init__(self, folder: str, threads: int, packing: str = "") -> None:
        settings = SessionSettings(threads=threads)
        library_version()  # loads ONNX Runtime itself
        if folder == _EMPTY:
            self._session = _smallest(settings)
            return
        bundle = Bundle.open(Path(folder), verify=False)
        if packing:
            options = bundle.manifest.session_options | _NO_PACKING
            changed = msgspec.structs.replace(bundle.manifest, session_options=options)
            bundle = replace(bundle, manifest=changed)
        self._bundle, self._threads = bundle, threads
        self._runner = open_runner(bundle, settings)
        self._slots: Slots | None = None
        self._generator: Generator | None = None

    def fill(self, pasts: list[int], capacity: int) -> dict[str, Any]:
        """Open a slot for each number of tokens and put as many random ones into it."""
        self._slots = open_slots(self._runner, len(pasts), capacity)
        found = []
        for slot, past in enumerate(pasts):
            started = time.perf_counter()
            self._append([slot], self._ids((1, past)))
            found.append(time.perf_counter() - started)
        return {"prefill_s": found, "cache_bytes": self._slots.nbytes}

    def steps(self, slots: list[int], count: int) -> dict[str, Any]:
        """Seconds of steps by one token of each slot; afterwards they hold what they held."""
        assert self._slots is not None
        held = self._slots.lengths[slots].tolist()
        found = []
        for _ in range(count):
            started = time.perf_counter()
            self._append(slots, self._ids((len(slots), 1)))
            found.append(time.perf_counter() - started)
        for slot, length in zip(slots, held, strict=True):
            self._slots.cut(slot, length)
        return {"step_s": found}

    def request(self, past: int, count: int) -> dict[str, Any]:
        """Seconds per new token of one request to a `Generator`, its prompt left out."""
        if self._generator is None:
            self._generator = Generator(
                self._bundle, threads=self._threads, slots=1, max_context=past + count
            )
        stream = self._generator.stream(
            self._ids((past,)).tolist(), max_new_tokens=count, min_new_tokens=count
        )
        times = [time.perf_counter() for _ in stream]
        return {"step_s": np.diff(times).tolist()}

    def memory(self) -> dict[str, int]:
        """Resident bytes of this process: all, and what is its own rather than of a mapped file."""
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        values = dict(line.split(":", 1) for line in lines if ":" in line)
        return {k: 1024 * int(values[k].split()[0]) for k in ("VmRSS", "RssAnon", "RssFile")}

    def _ids(self, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
        size = self._bundle.manifest.vocabulary.size
        return np.random.default_rng(shape[-1]).integers(0, size, shape)

    def _append(self, slots: list[int], ids: np.ndarray[Any, Any]) -> None:
        assert self._slots is not None
        for start in range(0, ids.shape[1], _CHUNK):
            part = ids[:, start : start + _CHUNK]
            lengths = np.full(len(slots), part.shape[1])
            hidden = self._slots.forward(slots, part, lengths)
        self._runner.head(hidden[:, -1])


def _smallest(settings: SessionSettings) -> Any:
    x, y = (ir.val(name, ir.DataType.FLOAT, [1]) for name in "xy")
    node = ir.node("Neg", [x], outputs=[y])
    graph = ir.Graph([x], [y], nodes=[node], opset_imports={"": 20})
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "smallest.onnx"
        ir.save(ir.Model(graph, ir_version=10), file)
        return open_session(file, {}, settings)


_ACTIONS: dict[str, Callable[..., dict[str, Any]]] = {
    action.__name__: action for action in (Model.fill, Model.steps, Model.request, Model.memory)
}

if __name__ == "__main__":
    serve(lambda: Model(sys.argv[1], int(sys.argv[2]), *sys.argv[3:]), _ACTIONS)
