"""Steps that look at the machine: driver, provider, and what of TensorRT is there."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from headport.engines import read_engines
from headport.gpu_probe import absent_libraries, needed_libraries, probe_gpu
from headport.providers import PROVIDERS
from headport.runner import open_runner
from headport.selftest import run_selftest
from headport.session import check_provider
from headport.validate.gpu.memory import used_memory
from headport.validate.gpu.numerics import judge_selftest
from headport.validate.gpu.steps import Context, Finding, Unproven

__all__ = ["check_driver", "check_placement", "check_tensorrt_plans", "check_tensorrt_provider"]

_TENSORRT = "libonnxruntime_providers_tensorrt.so"


def check_driver(context: Context) -> Finding:
    """The driver starts and knows a card."""
    del context
    probe = probe_gpu()
    if not probe:
        raise Unproven(str(probe.fault))
    cards = ", ".join(
        f"{gpu.name} ({gpu.memory_bytes / 2**30:.0f} GiB, compute capability "
        f"{gpu.compute_capability})"
        for gpu in probe.gpus
    )
    return Finding("measured", f"{cards}; the driver serves CUDA {probe.driver}")


def check_placement(context: Context) -> Finding:
    """The provider loads, and says where each operator runs."""
    provider = PROVIDERS["cuda"]
    check_provider(provider)
    before = used_memory()
    runner = open_runner(context.bundle, context.settings)
    context.found["runner"] = runner
    after = used_memory()
    operators = runner.cpu_operators()
    on_cpu = ", ".join(f"{count} × {name}" for name, count in sorted(operators.items()))
    text = f"{provider.name} runs every operator"
    if operators:
        text = f"{provider.name} runs the bundle, but for {on_cpu} on the CPU (--cpu-fallback)"
    loaded = None if before is None or after is None else after - before
    figures = {"cpu_operators": operators, "loaded_bytes": loaded}
    return Finding("measured", text, figures)


def check_tensorrt_provider(context: Context) -> Finding:
    """ONNX Runtime's own TensorRT provider finds its libraries; headport does not run on it."""
    del context
    spec = find_spec("onnxruntime")
    file = Path(spec.origin).parent / "capi" / _TENSORRT if spec and spec.origin else None
    if file is None or not file.is_file():
        raise Unproven("this ONNX Runtime build has no TensorRT provider")
    missing = absent_libraries(needed_libraries(file))
    if missing:
        listed = ", ".join(f"{name} ({source})" for name, source in missing.items())
        raise Unproven(f"its libraries are not here: {listed}")
    raise Unproven(
        "its libraries are here, but headport runs TensorRT through plans (step tensorrt-build)"
    )


def check_tensorrt_plans(context: Context) -> Finding:
    """Plans that the bundle carries answer on this card as its graphs did on ONNX Runtime."""
    from headport.runtime.tensorrt.runner import open_plans

    if not read_engines(context.bundle):
        raise Unproven("the bundle carries no TensorRT plan")
    return judge_selftest(run_selftest(context.bundle, runner=open_plans(context.bundle)))
