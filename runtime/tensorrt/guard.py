"""What must hold before a plan is touched: it is this bundle's, and this machine can run it.

The libraries crash where they should complain: without a driver, a runtime object comes into being
and ends the process when it is used. So the driver is asked first, with nothing but ctypes.
"""

from __future__ import annotations

from headport.bundle import Bundle
from headport.engines import EngineRecord, installed_backend, strangers, unusable
from headport.errors import BundleError, EngineError, NoGpuError
from headport.gpu_probe import GpuProbe, probe_gpu

__all__ = ["require_usable"]


def require_usable(
    bundle: Bundle,
    record: EngineRecord,
    *,
    probe: GpuProbe | None = None,
    version: str | None = None,
) -> None:
    """Refuse a plan that is not this bundle's, or that this machine cannot run.

    Args:
        bundle: It carries the plan.
        record: The plan's build record.
        probe: What the driver says; None: it is asked.
        version: Of the installed backend; None: it is looked up.

    Raises:
        BundleError: If the plan was made from another bundle, or is another plan.
        NoGpuError: If there is no GPU.
        EngineError: If the backend, its version or the GPU is not the plan's.
    """
    again = f"build it again: {record.command}"
    if foreign := strangers(bundle, record):
        raise BundleError(f"{bundle.path}: {'; '.join(foreign)}; {again}")
    probe = probe or probe_gpu()
    if not probe:
        raise NoGpuError(
            f"{record.plan} runs on a GPU, and there is none: {probe.fault}; run the bundle with "
            "ONNX Runtime instead (--provider cpu)"
        )
    version = version or installed_backend(record.backend)
    if faults := unusable(record, probe, version):
        raise EngineError(f"{record.plan} cannot be run here: {'; '.join(faults)}; {again}")
