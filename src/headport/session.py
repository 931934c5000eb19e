"""The one factory of ONNX Runtime sessions; no other module imports onnxruntime.

Session options are part of the artefact: the same file can answer differently under other
options, so they come from the manifest and nothing is left to a library's default.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from headport.errors import BundleError, UsageError

__all__ = [
    "Session",
    "SessionSettings",
    "available_providers",
    "library_version",
    "open_session",
    "usable_cpus",
]

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class SessionSettings:
    """What the caller may choose about a session; none of it may change an answer."""

    threads: int = 0  # intra-op threads; 0 = as many as this process may use CPUs
    provider: str = "CPUExecutionProvider"


def _onnxruntime() -> Any:
    try:
        import onnxruntime
    except ImportError as error:
        raise UsageError(
            "ONNX Runtime is not installed; install headport[cpu] or headport[gpu] (not both)"
        ) from error
    if not hasattr(onnxruntime, "InferenceSession"):
        raise UsageError(
            "the onnxruntime package is hollow, as after uninstalling one of two builds; "
            "reinstall onnxruntime alone and run `headport doctor`"
        )
    return onnxruntime


def library_version() -> str:
    """Version of the installed ONNX Runtime."""
    return str(_onnxruntime().__version__)


def available_providers() -> tuple[str, ...]:
    """Execution providers this build knows; whether one works only a session can tell."""
    return tuple(_onnxruntime().get_available_providers())


class Session:
    """A loaded graph: named arrays in, named arrays out, or buffers bound for in-place use."""

    def __init__(self, inner: Any, ort: Any) -> None:
        self._inner = inner
        self._ort = ort
        self.inputs: tuple[str, ...] = tuple(port.name for port in inner.get_inputs())
        self.outputs: tuple[str, ...] = tuple(port.name for port in inner.get_outputs())
        self.providers: tuple[str, ...] = tuple(inner.get_providers())
        self._shapes = {port.name: tuple(port.shape) for port in inner.get_inputs()}
        self._dtypes = {
            port.name: _numpy_dtype(port.type)
            for port in (*inner.get_inputs(), *inner.get_outputs())
        }

    def shape(self, name: str) -> tuple[int | str | None, ...]:
        """Declared shape of an input; symbols are strings."""
        return self._shapes[name]

    def dtype(self, name: str) -> np.dtype[Any]:
        """Element type of an input or output, always taken from the graph itself."""
        return self._dtypes[name]

    def run(
        self, feeds: Mapping[str, Array], outputs: Sequence[str] | None = None
    ) -> dict[str, Array]:
        """Run once; feeds hold every declared input, the named outputs (or all) come back."""
        names = self.outputs if outputs is None else tuple(outputs)
        values = self._inner.run(list(names), dict(feeds))
        return dict(zip(names, values, strict=True))

    def bind(self) -> Binding:
        """A binding that keeps buffers fixed between runs."""
        return Binding(self._inner, self._ort)


class Binding:
    """Fixed buffers for one session. A buffer bound as input and output is updated in place.

    Binding costs time for each buffer; a run costs none for buffers that stay as they are.
    """

    def __init__(self, inner: Any, ort: Any) -> None:
        self._inner = inner
        self._ort = ort
        self._binding = inner.io_binding()
        # By address, so that a buffer bound twice is one value; the array is kept with it, because
        # an address is only unique among living objects and ONNX Runtime does not own the memory.
        self._values: dict[int, tuple[Any, Array]] = {}

    def _value(self, buffer: Array) -> Any:
        # On CPU an OrtValue made from an array uses the array's own memory, but only if the array
        # is contiguous: otherwise it is a copy, and writes on either side would go unseen.
        if not (buffer.flags.c_contiguous and buffer.flags.writeable):
            raise ValueError("a bound buffer must be C-contiguous and writable")
        key = id(buffer)
        if key not in self._values:
            self._values[key] = (self._ort.OrtValue.ortvalue_from_numpy(buffer), buffer)
        return self._values[key][0]

    def input(self, name: str, buffer: Array) -> None:
        """Bind an array as input; later changes to its contents are seen.

        Raises:
            ValueError: If the array is not C-contiguous and writable.
        """
        self._binding.bind_ortvalue_input(name, self._value(buffer))

    def output(self, name: str, buffer: Array) -> None:
        """Bind an array as output.

        Raises:
            ValueError: If the array is not C-contiguous and writable.
        """
        self._binding.bind_ortvalue_output(name, self._value(buffer))

    def run(self) -> None:
        """Run on the bound buffers; nothing is fetched or copied."""
        self._inner.run_with_iobinding(self._binding)


_DTYPES = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(double)": np.float64,
    "tensor(int64)": np.int64,
    "tensor(int32)": np.int32,
    "tensor(int8)": np.int8,
    "tensor(uint8)": np.uint8,
    "tensor(bool)": np.bool_,
}


def _numpy_dtype(name: str) -> np.dtype[Any]:
    if name not in _DTYPES:
        raise BundleError(f"a graph input or output of type {name} cannot be read by this runtime")
    return np.dtype(_DTYPES[name])


# Threads wait for the next operator by spinning. Between operators that takes microseconds; ONNX
# Runtime's default spins longer, also through the gaps between runs, where backbone and head, which
# have threads of their own, take the cores from each other and from other processes: on two busy
# cores a token took four times as long.
_SPINNING = {"session.intra_op.spin_duration_us": "100"}


def open_session(
    file: Path, options: Mapping[str, str], settings: SessionSettings | None = None
) -> Session:
    """Load one graph.

    Args:
        file: The `.onnx` file; its external data is found beside it.
        options: ONNX Runtime session configuration entries, as the manifest lists them.
        settings: Threads and provider.

    Raises:
        UsageError: If ONNX Runtime is missing or lacks the provider, also silently.
        BundleError: If ONNX Runtime cannot load the graph.
    """
    ort = _onnxruntime()
    chosen = settings or SessionSettings()
    session_options = ort.SessionOptions()
    session_options.log_severity_level = 3
    session_options.intra_op_num_threads = chosen.threads or usable_cpus()
    session_options.inter_op_num_threads = 1
    session_options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    for key, value in {**_SPINNING, **options}.items():
        session_options.add_session_config_entry(key, value)
    if chosen.provider not in ort.get_available_providers():
        raise UsageError(
            f"provider {chosen.provider} is not in this ONNX Runtime build "
            f"(it has {', '.join(ort.get_available_providers())})"
        )
    try:
        inner = ort.InferenceSession(str(file), session_options, providers=[chosen.provider])
    except Exception as error:  # ONNX Runtime has no common error class for load failures
        first = str(error).strip().splitlines()[0]
        raise BundleError(f"{file.name}: ONNX Runtime cannot load it: {first}") from error
    if chosen.provider not in inner.get_providers():
        raise UsageError(
            f"provider {chosen.provider} was asked for but ONNX Runtime fell back to "
            f"{', '.join(inner.get_providers())}; run `headport doctor`"
        )
    return Session(inner, ort)


def usable_cpus() -> int:
    """CPUs this process may use.

    Containers often allow fewer than the machine has, by affinity or by a quota of the control
    group; spinning threads beyond them hurt.
    """
    if hasattr(os, "sched_getaffinity"):
        allowed = len(os.sched_getaffinity(0))
    else:
        allowed = os.cpu_count() or 1
    return max(1, min(allowed, _cpu_quota(_CGROUP_QUOTA) or allowed))


_CGROUP_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def _cpu_quota(file: Path) -> int | None:
    # "200000 100000": microseconds of CPU time in each period of microseconds; "max" is no quota.
    try:
        quota, period = file.read_text(encoding="ascii").split()
        return -(-int(quota) // int(period))
    except (OSError, ValueError):
        return None
