"""The one factory of ONNX Runtime sessions; no other module imports onnxruntime.

Session options are part of the artefact: the same file can answer differently under other
options, so they come from the manifest and nothing is left to a library's default.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from headport.binding import Binding, DeviceArray, run_error
from headport.errors import BundleError, HeadportError, UsageError
from headport.freed_memory import keep_freed_memory
from headport.gpu_probe import absent_libraries, load_library, needed_libraries, probe_gpu
from headport.kernels import OPTION, Kernels, needed_kernels
from headport.machine import usable_cpus
from headport.progress import say
from headport.providers import AUTO, PROVIDERS, Provider, find_provider, provider_of_target

__all__ = [
    "Binding",
    "DeviceArray",
    "Session",
    "SessionSettings",
    "available_providers",
    "check_kernels",
    "check_provider",
    "library_version",
    "missing_libraries",
    "open_session",
]

Array = npt.NDArray[Any]
_MOST_THREADS = 1024


@dataclass(frozen=True)
class SessionSettings:
    """What the caller may choose about a session.

    Raises:
        UsageError: If `threads` is out of range.
    """

    # Intra-op threads; 0 = as many as this process may use CPUs, or as a bundle records that was
    # measured on such a machine: see `headport.tuned`.
    threads: int = 0
    provider: str = AUTO  # a key or a name of `headport.providers`; auto = what the target is for
    cpu_fallback: bool = False  # what the provider cannot do runs on the CPU; else it is refused
    capture: bool = False  # record a decode step once as a CUDA graph and replay it
    kernels: Path | None = None  # headport's own, for bundles that need them; or $HEADPORT_KERNELS
    spinning: bool = True  # threads wait for the next operator by spinning, briefly, not asleep

    def __post_init__(self) -> None:
        if not 0 <= self.threads <= _MOST_THREADS:  # ONNX Runtime would start as many
            raise UsageError(
                f"threads must be from 1 to {_MOST_THREADS}, or 0 for all available cores, "
                f"{self.threads} was given"
            )

    def for_target(self, target: str) -> SessionSettings:
        """The same with the provider's own name in place of `auto`.

        With `cpu_fallback` a provider that does not work here gives way to the CPU, and the
        terminal says why.

        Raises:
            UsageError: If there is no provider of that name.
        """
        auto = self.provider == AUTO
        found = provider_of_target(target) if auto else find_provider(self.provider)
        if self.cpu_fallback and found.library is not None:
            try:
                check_provider(found)
            except UsageError as fault:
                say(f"{fault}; everything runs on the CPU instead (--cpu-fallback)")
                found = PROVIDERS["cpu"]
        return replace(self, provider=found.name)


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
    keep_freed_memory()
    return onnxruntime


def library_version() -> str:
    """Version of the installed ONNX Runtime."""
    return str(_onnxruntime().__version__)


def available_providers() -> tuple[str, ...]:
    """Execution providers this build knows; whether one works only a session can tell."""
    return tuple(_onnxruntime().get_available_providers())


class Session:
    """A loaded graph: named arrays in, named arrays out, or buffers bound for in-place use."""

    def __init__(
        self, inner: Any, ort: Any, provider: Provider = PROVIDERS["cpu"], file: str = "graph"
    ) -> None:
        self._inner = inner
        self._file = file
        self._ort = ort
        self.device = provider.device
        self.cpu_operators: dict[str, int] = _cpu_operators(inner, provider)  # type → nodes
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
        """Run once; feeds hold every declared input, the named outputs (or all) come back.

        Raises:
            RunError: If ONNX Runtime fails.
        """
        names = self.outputs if outputs is None else tuple(outputs)
        try:
            values = self._inner.run(list(names), dict(feeds))
        except Exception as error:
            raise run_error(self._file, error) from error
        return dict(zip(names, values, strict=True))

    def bind(self) -> Binding:
        """A binding that keeps buffers fixed between runs."""
        return Binding(self._inner, self._ort, self._file)

    def array(self, initial: Array) -> DeviceArray:
        """A copy of an array where the session computes."""
        return DeviceArray(self._ort, self.device, initial)


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
_SPINNING = {
    True: {"session.intra_op.spin_duration_us": "100"},
    False: {"session.intra_op.allow_spinning": "0"},
}


def open_session(
    file: Path, options: Mapping[str, str], settings: SessionSettings | None = None
) -> Session:
    """Load one graph.

    Args:
        file: The `.onnx` file; its external data is found beside it.
        options: ONNX Runtime session configuration entries, as the manifest lists them.
        settings: Threads and provider; `auto` is the CPU here, where no target is known.

    Raises:
        UsageError: If ONNX Runtime is missing or lacks the provider, the provider does not work on
            this machine, it lacks operators of the graph and `cpu_fallback` is off, or the graph
            needs headport's kernels and these are not given.
        BundleError: If ONNX Runtime cannot load the graph.
    """
    ort = _onnxruntime()
    chosen = settings or SessionSettings()
    provider = find_provider("cpu" if chosen.provider == AUTO else chosen.provider)
    check_provider(provider)
    strict = provider.library is not None and not chosen.cpu_fallback
    try:
        inner = _open(file, options, chosen, provider, strict)
    except HeadportError:
        raise
    except Exception as error:  # ONNX Runtime has no common error class for load failures
        first = str(error).strip().splitlines()[0]
        if OPTION in options and _UNREGISTERED in str(error):
            raise UsageError(
                "headport's kernels were loaded and registered no operators for ONNX Runtime "
                f"{ort.__version__}; build them again with `make kernels`"
            ) from error
        if strict and _REFUSED in str(error):
            raise UsageError(_refusal(file, options, chosen, provider)) from error
        raise BundleError(f"{file.name}: ONNX Runtime cannot load it: {first}") from error
    if provider.name not in inner.get_providers():
        raise UsageError(
            f"provider {provider.name} was asked for but ONNX Runtime fell back to "
            f"{', '.join(inner.get_providers())}; run `headport doctor`"
        )
    session = Session(inner, ort, provider, file.name)
    if session.cpu_operators and provider.library is not None:
        say(f"{file.name}: on the CPU, not on {provider.name}: {_listed(session.cpu_operators)}")
    return session


_UNREGISTERED = "is not a registered function/op"
_REFUSED = "fallback to CPU EP has been explicitly disabled"


def _open(
    file: Path,
    options: Mapping[str, str],
    chosen: SessionSettings,
    provider: Provider,
    strict: bool,
) -> Any:
    ort = _onnxruntime()
    session_options = ort.SessionOptions()
    session_options.log_severity_level = 3
    session_options.intra_op_num_threads = chosen.threads or usable_cpus()
    session_options.inter_op_num_threads = 1
    session_options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    entries = {**_SPINNING[chosen.spinning], **options}
    provider_options = dict(provider.options)
    if provider.library is not None:
        entries["session.record_ep_graph_assignment_info"] = "1"
        entries["session.disable_cpu_ep_fallback"] = "1" if strict else "0"
        if chosen.capture:
            provider_options["enable_cuda_graph"] = "1"
    kernels = needed_kernels(options, chosen.kernels)
    if kernels is not None:
        del entries[OPTION]
        _register(kernels, session_options)
    for key, value in entries.items():
        session_options.add_session_config_entry(key, value)
    return ort.InferenceSession(
        str(file), session_options, providers=[(provider.name, provider_options)]
    )


def check_kernels(kernels: Kernels) -> None:
    """Register a library, which runs its self-test.

    Raises:
        UsageError: If ONNX Runtime refuses it or the test fails.
    """
    _register(kernels, _onnxruntime().SessionOptions())


def _register(kernels: Kernels, session_options: Any) -> None:
    try:
        session_options.register_custom_ops_library(str(kernels.file))
    except Exception as error:
        first = str(error).strip().splitlines()[0]
        raise UsageError(
            f"{kernels.file}: headport's kernels were expected to pass their self-test and be "
            f"registered: {first}; build them again with `make kernels`"
        ) from error


def _refusal(
    file: Path, options: Mapping[str, str], chosen: SessionSettings, provider: Provider
) -> str:
    # ONNX Runtime names no operator, so the graph is loaded once more to see where each would run.
    lenient = replace(chosen, capture=False)
    found = _cpu_operators(_open(file, options, lenient, provider, False), provider)
    return (
        f"{file.name}: {provider.name} would leave operators to the CPU: {_listed(found)}; pass "
        "--cpu-fallback to accept that, or use another target or provider"
    )


def _cpu_operators(inner: Any, provider: Provider) -> dict[str, int]:
    if provider.library is None:
        return {}
    count: Counter[str] = Counter()
    for part in inner.get_provider_graph_assignment_info():
        if part.ep_name == PROVIDERS["cpu"].name:
            count.update(node.op_type for node in part.get_nodes())
    return dict(count)


def _listed(operators: Mapping[str, int]) -> str:
    return ", ".join(f"{count} × {name}" for name, count in sorted(operators.items())) or "none"


def check_provider(provider: Provider) -> None:
    """Refuse a provider that cannot work here, before ONNX Runtime falls back in silence.

    Raises:
        UsageError: If this build lacks it, there is no GPU, or a library is missing.
    """
    ort = _onnxruntime()
    known = ort.get_available_providers()
    if provider.name not in known:
        advice = "" if provider.library is None else "; install headport[gpu] instead of [cpu]"
        raise UsageError(
            f"provider {provider.name} is not in this ONNX Runtime build "
            f"(it has {', '.join(known)}){advice}"
        )
    if provider.library is None:
        return
    probe = probe_gpu()
    if not probe:
        raise UsageError(f"provider {provider.name} needs a GPU: {probe.fault}")
    missing = missing_libraries(provider)
    if missing:
        listed = ", ".join(f"{name} ({source})" for name, source in missing.items())
        raise UsageError(f"provider {provider.name} lacks libraries: {listed}")


def missing_libraries(provider: Provider) -> dict[str, str]:
    """Shared libraries that a provider asks for and this machine lacks → what brings each."""
    folder = _library_folder()
    if provider.library is None or folder is None or not (folder / provider.library).is_file():
        return {}
    missing = absent_libraries(needed_libraries(folder / provider.library))
    for name in provider.optional:
        load_library(name)
    return missing


def _library_folder() -> Path | None:
    spec = find_spec("onnxruntime")
    return Path(spec.origin).parent / "capi" if spec and spec.origin else None
