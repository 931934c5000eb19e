"""Steps that build TensorRT plans on this machine: the ways to build that need a driver.

Each builds all graphs of the bundle in a scratch folder, and holds the plans to the self-test.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any, Literal

from headport.bundle import Bundle
from headport.engines import installed_backend
from headport.errors import LoweringError, UsageError
from headport.gpu_probe import probe_gpu
from headport.runtime.engine.backends import compute_capabilities, load_backend
from headport.runtime.engine.command import engine
from headport.runtime.engine.options import Options as EngineOptions
from headport.runtime.tensorrt.runner import open_plans
from headport.selftest import run_selftest
from headport.validate.gpu.numerics import judge_selftest
from headport.validate.gpu.speed import decode_times
from headport.validate.gpu.steps import Context, Finding, Unproven

__all__ = [
    "check_build",
    "check_refit",
    "check_timing_cache",
    "check_version_compatible",
    "judge_timing_cache",
]

_LOWERED = ("portable", "tensorrt")  # targets that plans are built of
_BACKENDS: tuple[Literal["tensorrt", "tensorrt-rtx"], ...] = ("tensorrt", "tensorrt-rtx")


def check_build(context: Context) -> Finding:
    """Plans that are built here answer like the bundle; how long a decode step takes."""
    with _scratch() as folder:
        bundle, seconds = _build(context, Path(folder) / "plans")
        runner = open_plans(bundle)
        found = judge_selftest(run_selftest(bundle, runner=runner))
        times = decode_times(runner, bundle.manifest, 1)
    text = f"built in {seconds:.1f} s; a decode step takes {times['median']:.2f} ms; {found.text}"
    figures = {"build_seconds": seconds, "decode_ms": times}
    return Finding(found.status, text, found.figures | figures)


def check_timing_cache(context: Context) -> Finding:
    """A second build takes the first one's timings, and its plans answer right as well."""
    with _scratch() as folder:
        file = Path(folder) / "timings"
        _, first = _build(context, Path(folder) / "first", timing_cache=file)
        size = file.stat().st_size if file.is_file() else 0
        bundle, second = _build(context, Path(folder) / "second", timing_cache=file)
        found = judge_selftest(run_selftest(bundle, runner=open_plans(bundle)))
    return judge_timing_cache(first, second, size, found)


def judge_timing_cache(first: float, second: float, size: int, selftest: Finding) -> Finding:
    """Hold a build with timings against the one that measured them.

    Args:
        first: Seconds of the build that wrote them.
        second: Seconds of the build that read them.
        size: Of the file, bytes.
        selftest: Of the second build's plans. No claim carries over from the first: the same
            timings need not give the same plan.
    """
    text = f"{first:.1f} s without timings, {second:.1f} s with them ({size} bytes)"
    figures = {"first_seconds": first, "second_seconds": second, "cache_bytes": size}
    if not size:
        return Finding("failed", f"{text}: no timings were written", figures)
    return Finding(selftest.status, f"{text}; {selftest.text}", selftest.figures | figures)


def check_version_compatible(context: Context) -> Finding:
    """Plans that later versions are to load are loaded, with the code they bring."""
    return _with_flag(context, "version_compatible")


def check_refit(context: Context) -> Finding:
    """Plans without weights take them from the graphs, and then answer right."""
    return _with_flag(context, "strip_weights")


def _with_flag(context: Context, flag: str) -> Finding:
    with _scratch() as folder:
        bundle, seconds = _build(context, Path(folder) / "plans", **{flag: True})
        found = judge_selftest(run_selftest(bundle, runner=open_plans(bundle)))
        size = sum(file.stat().st_size for file in bundle.path.glob("engines/*.plan"))
    text = f"{size / 1e6:.1f} MB built in {seconds:.1f} s; {found.text}"
    return Finding(found.status, text, found.figures | {"plan_bytes": size})


def _scratch() -> Any:
    return tempfile.TemporaryDirectory(prefix="headport-gpu-check.")


def _build(context: Context, output: Path, **options: Any) -> tuple[Bundle, float]:
    """The bundle with plans for this GPU, and the seconds that took."""
    target = context.bundle.manifest.target
    if target not in _LOWERED:
        raise Unproven(f"the bundle is lowered to {target}; plans are built of the portable one")
    backend = next((name for name in _BACKENDS if installed_backend(name)), None)
    if backend is None:
        raise Unproven(f"none of {', '.join(_BACKENDS)} is installed here")
    if backend == "tensorrt-rtx":
        # Some ways to build it only knows for one generation at a time.
        here = "SM" + probe_gpu().gpus[0].compute_capability.replace(".", "")
        known = compute_capabilities(load_backend(backend))
        if here not in known:
            raise Unproven(f"{backend} builds for {', '.join(known)}; the GPU here is {here}")
        options = {**options, "compute_capability": (here,)}
    started = time.perf_counter()
    chosen = EngineOptions(bundle=context.bundle.path, output=output, backend=backend, **options)
    try:
        bundle = engine(chosen)
    except (LoweringError, UsageError) as error:  # nothing was built, so nothing is wrong
        raise Unproven(str(error)) from error
    return bundle, time.perf_counter() - started
