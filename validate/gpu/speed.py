"""Steps that measure: time per token, memory, and a decode step recorded as a CUDA graph."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from headport.device_runner import DeviceRunner
from headport.runner import Runner, open_runner
from headport.validate.gpu.memory import used_memory
from headport.validate.gpu.steps import Context, Finding, Unproven

__all__ = ["check_capture", "decode_times", "judge_capture", "measure_latency"]

Float32 = npt.NDArray[np.float32]

_BATCHES = (1, 8)
_PROMPT, _WARM_UP, _TIMED = 64, 8, 64  # tokens, steps, steps
_PREFILL = 512  # tokens


def measure_latency(context: Context) -> Finding:
    """Milliseconds per decode step, logits fetched, at several batch sizes; and memory."""
    runner, manifest = context.found["runner"], context.bundle.manifest
    figures: dict[str, Any] = {}
    for batch in _BATCHES:
        figures[f"batch_{batch}"] = {"decode_ms": decode_times(runner, manifest, batch)}
    figures["prefill_ms"] = _prefill(runner, manifest)
    figures["used_bytes"] = used_memory()
    rows = ", ".join(
        f"batch {batch} {figures[f'batch_{batch}']['decode_ms']['median']:.2f} ms"
        for batch in _BATCHES
    )
    width, prefill = figures["prefill_ms"]["tokens"], figures["prefill_ms"]["median"]
    text = f"a decode step takes {rows} (median of {_TIMED}); a prompt of {width} {prefill:.1f} ms"
    return Finding("measured", text, figures)


def decode_times(runner: Runner, manifest: Any, batch: int) -> dict[str, float]:
    """Milliseconds per decode step, logits fetched: median, and percentiles 10 and 90."""
    room = min(_PROMPT + _WARM_UP + _TIMED, manifest.model.max_context)
    prompt = max(1, room - _WARM_UP - _TIMED)
    ids = _ids(manifest, batch, prompt)
    cache = runner.new_cache(batch, room)
    hidden = runner.forward(cache, ids, np.full(batch, prompt))[:, -1]
    seconds = []
    ones = np.ones(batch, np.int64)
    for _ in range(room - prompt):
        started = time.perf_counter()
        output = runner.head(hidden)
        if output.candidates is not None:
            best = output.candidates.ids[:, 0]
        else:
            assert output.logits is not None
            best = output.logits.argmax(axis=1)
        hidden = runner.forward(cache, best[:, None], ones)[:, 0]
        seconds.append(time.perf_counter() - started)
    return _summary(seconds[_WARM_UP:] or seconds)


def _prefill(runner: Runner, manifest: Any) -> dict[str, float]:
    width = min(_PREFILL, manifest.model.max_context)
    ids = _ids(manifest, 1, width)
    seconds = []
    for _ in range(4):
        cache = runner.new_cache(1, width)
        started = time.perf_counter()
        runner.forward(cache, ids, np.array([width]))
        seconds.append(time.perf_counter() - started)
    return {"tokens": width, **_summary(seconds[1:])}


def _ids(manifest: Any, batch: int, width: int) -> npt.NDArray[np.int64]:
    size = manifest.vocabulary.kept_size or manifest.vocabulary.size
    rng = np.random.Generator(np.random.Philox(key=13))
    return rng.integers(0, size, (batch, width))


def _summary(seconds: list[float]) -> dict[str, float]:
    found = np.array(seconds) * 1e3
    low, middle, high = np.quantile(found, (0.1, 0.5, 0.9))
    return {"p10": float(low), "median": float(middle), "p90": float(high)}


def check_capture(context: Context) -> Finding:
    """A decode step recorded as a CUDA graph gives what the same step gives unrecorded."""
    plain, manifest = context.found["runner"], context.bundle.manifest
    if not isinstance(plain, DeviceRunner):
        raise Unproven("its caches grow, and a recording needs fixed buffers")
    recorded = open_runner(context.bundle, replace(context.settings, capture=True))
    expected, found = (_rows(runner, manifest) for runner in (plain, recorded))
    times = {
        name: decode_times(runner, manifest, 1)["median"]
        for name, runner in (("plain_ms", plain), ("recorded_ms", recorded))
    }
    assert manifest.selftest is not None
    return judge_capture(expected, found, manifest.selftest.hidden_states, times)


def judge_capture(
    expected: Float32, found: Float32, accepted: float, times: dict[str, float]
) -> Finding:
    """Hold the largest difference of hidden states against the self-test's tolerance."""
    error = float(np.abs(found - expected).max(initial=0.0))
    same = bool(len(expected) and np.isfinite(found).all() and error <= accepted)
    text = (
        f"max |Δ| of hidden states {error:.2e} (accepted {accepted:.2e}); a step takes "
        f"{times['recorded_ms']:.2f} ms recorded, {times['plain_ms']:.2f} ms not"
    )
    return Finding("proved" if same else "failed", text, {"error": error, **times})


def _rows(runner: Runner, manifest: Any) -> Float32:
    """Hidden states of a ragged prompt and decode steps, one with a row that waits."""
    room = min(32, manifest.model.max_context)
    lengths = np.array([max(1, room - 6), 1], np.int64)
    ids = _ids(manifest, 2, room)
    cache = runner.new_cache(2, room)
    hidden = runner.forward(cache, ids[:, : lengths[0]], lengths)
    rows = [hidden[b, :length] for b, length in enumerate(lengths)]
    for step, new in enumerate(([1, 1], [1, 0], [1, 1], [0, 1])[: room - int(lengths[0])]):
        given = np.array(new, np.int64)
        found = runner.forward(cache, ids[:, step : step + 1], given)[:, 0]
        rows.append(found[given == 1])
    return np.concatenate(rows)
