"""One plan from one ONNX file, with whichever backend is handed in.

The same calls serve TensorRT and TensorRT-RTX; `trt` is the imported module. A builder says little
by its return values: it gives None for a plan that failed and a warning for an input it drops, so
everything it logs is kept, and a warning that is not known to be harmless is an error.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from headport.manifest import Port
from headport.runtime.engine.backends import compute_capabilities
from headport.runtime.engine.request import BuildAnswer, BuildRequest, ParserFault

__all__ = ["CALLS", "build_plan"]

# Warnings that change nothing in a plan, and why; every other one stops the build.
_HARMLESS: tuple[tuple[str, str], ...] = (
    ("CUDA initialization failure", "the plan is for GPUs that are named, not for one here"),
    ("[Uu]nable to determine GPU memory usage", "there is no GPU to ask"),
    ("CUDA lazy loading is not enabled", "it costs memory while building only"),
    (r"Make sure (in|out)put .* has Int64 binding", "buffers get their type from the engine"),
)
# All that this file asks of a backend, for a check by name against one that cannot be installed.
CALLS = (
    *("Builder", "OnnxParser", "ILogger", "NetworkDefinitionCreationFlag", "BuilderFlag"),
    *("Builder.create_network", "Builder.create_builder_config"),
    *("Builder.create_optimization_profile", "Builder.build_serialized_network"),
    *("OnnxParser.parse_from_file", "OnnxParser.num_errors", "OnnxParser.get_error"),
    *("INetworkDefinition.num_layers", "INetworkDefinition.get_layer"),
    *("INetworkDefinition.num_inputs", "INetworkDefinition.get_input"),
    *("INetworkDefinition.num_outputs", "INetworkDefinition.get_output"),
    *("IBuilderConfig.add_optimization_profile", "IBuilderConfig.set_flag"),
    *("IBuilderConfig.clear_flag", "IBuilderConfig.get_flag"),
    *("IOptimizationProfile.set_shape",),
)
_DTYPES = {  # of the library → of ONNX, as the manifest writes them
    "FLOAT": "float",
    "HALF": "float16",
    "BF16": "bfloat16",
    "FP8": "float8e4m3fn",
}


class _StopError(Exception):
    """The build cannot go on; the message says why."""


def build_plan(trt: Any, request: BuildRequest) -> BuildAnswer:
    """Parse, configure and build; the plan is written to `request.plan`.

    Args:
        trt: The backend's module.
        request: What to build; its options have been checked against the module.

    Returns:
        What the network is, and why there is no plan if there is none.
    """
    log: list[str] = []
    warnings: list[str] = []
    logger = _logger(trt, log, warnings)
    start = time.perf_counter()
    network = None
    faults: tuple[ParserFault, ...] = ()
    flags: tuple[str, ...] = ()
    error = None
    builder = trt.Builder(logger)
    try:
        network, parser = _network(trt, builder, logger)
        faults = tuple(_parse(parser, request.model))
        if faults:
            raise _StopError("the parser refuses " + "; ".join(map(str, faults)))
        _check_network(network, request)
        config = builder.create_builder_config()
        flags = _configure(trt, builder, config, request)
        plan = builder.build_serialized_network(network, config)
        if plan is None:
            raise _StopError(
                "the builder gives no plan; it says: " + (_last_error(log) or "nothing")
            )
        if fatal := _fatal(warnings):
            raise _StopError("the builder warns: " + "; ".join(fatal))
        Path(request.plan).write_bytes(bytes(memoryview(plan)))
        _save_timings(config, request)
    except _StopError as stop:
        error = str(stop)
    return BuildAnswer(
        error=error,
        faults=faults,
        version=str(trt.__version__),
        inputs=tuple(_ports(network, "input")) if network is not None else (),
        outputs=tuple(_ports(network, "output")) if network is not None else (),
        layers=dict(sorted(_layers(network, "type").items())) if network is not None else {},
        types=dict(sorted(_layers(network, "dtype").items())) if network is not None else {},
        flags=flags,
        log=tuple(log),
        seconds=time.perf_counter() - start,
        peak_memory_bytes=_peak_memory(),
    )


def _logger(trt: Any, log: list[str], warnings: list[str]) -> Any:
    class Logger(trt.ILogger):  # type: ignore[misc]
        """Keeps what the library says; the first logger of a process is the only one."""

        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            name = str(severity).rsplit(".", maxsplit=1)[-1]
            if name == "VERBOSE":
                return
            log.append(f"{name}: {message}")
            if name == "WARNING":
                warnings.append(message)

    return Logger()


def _network(trt: Any, builder: Any, logger: Any) -> tuple[Any, Any]:
    # Types are taken from the file, which is the only mode of newer versions.
    strongly = getattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
    network = builder.create_network(0 if strongly is None else 1 << int(strongly))
    return network, trt.OnnxParser(network, logger)


def _parse(parser: Any, model: str) -> Iterator[ParserFault]:
    # By path: from bytes, tensors beside the file would not be found.
    if parser.parse_from_file(model):
        return
    found = [parser.get_error(index) for index in range(parser.num_errors)]
    for fault in found:
        yield ParserFault(
            code=str(fault.code()).rsplit(".", maxsplit=1)[-1],
            node=_told(fault, "node_name"),
            operator=_told(fault, "node_operator"),
            text=str(fault.desc()),
        )
    if not found:
        yield ParserFault(code="UNKNOWN", node="", operator="", text="it gives no reason")


def _told(fault: Any, name: str) -> str:
    with suppress(AttributeError):
        return str(getattr(fault, name)())
    return ""


def _check_network(network: Any, request: BuildRequest) -> None:
    if network.num_layers == 0:
        raise _StopError(
            f"the network of {Path(request.model).name} is empty; are its tensors beside it?"
        )
    found = {port.name: port for port in _ports(network, "input")}
    for port in request.inputs:
        if port.name not in found:
            raise _StopError(f"the network has no input {port.name!r}; nothing reads it")
        expected = tuple(d if isinstance(d, int) else -1 for d in port.shape)
        if found[port.name].shape != expected:
            raise _StopError(
                f"input {port.name} became {list(found[port.name].shape)}, "
                f"{list(expected)} was expected: a size that varies was fixed"
            )


def _configure(trt: Any, builder: Any, config: Any, request: BuildRequest) -> tuple[str, ...]:
    for name in request.flags:
        config.set_flag(getattr(trt.BuilderFlag, name))
    if (tf32 := getattr(trt.BuilderFlag, "TF32", None)) is not None:
        config.clear_flag(tf32)  # float32 means float32; it is on by default
    if request.workspace_bytes is not None:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, request.workspace_bytes)
    _set_targets(trt, config, request.compute_capabilities)
    _load_timings(config, request)
    for profile in request.profiles:
        made = builder.create_optimization_profile()
        for name, (low, usual, high) in profile.shapes.items():
            made.set_shape(name, low, usual, high)
        if config.add_optimization_profile(made) < 0:
            raise _StopError(f"the profile {profile.name!r} is refused: {profile.shapes}")
    members = {name for name in dir(trt.BuilderFlag) if name.isupper()}
    return tuple(sorted(n for n in members if config.get_flag(getattr(trt.BuilderFlag, n))))


def _set_targets(trt: Any, config: Any, names: tuple[str, ...]) -> None:
    if not names:
        return
    known = compute_capabilities(trt)
    if unknown := [name for name in names if name not in known]:
        raise _StopError(f"it builds for {', '.join(known)}, not for {', '.join(unknown)}")
    config.num_compute_capabilities = len(names)
    for index, name in enumerate(names):
        if not config.set_compute_capability(getattr(trt.ComputeCapability, name), index):
            raise _StopError(f"it refuses the compute capability {name}")


def _load_timings(config: Any, request: BuildRequest) -> None:
    if request.timing_cache is None:
        return
    file = Path(request.timing_cache)
    known = file.read_bytes() if file.is_file() else b""
    cache = config.create_timing_cache(known)
    if cache is None and known:  # of another version, or no cache at all: measured anew
        cache = config.create_timing_cache(b"")
    if cache is None or not config.set_timing_cache(cache, ignore_mismatch=False):
        raise _StopError(f"it takes no timing cache from {file.name}; remove the file")


def _save_timings(config: Any, request: BuildRequest) -> None:
    if request.timing_cache is not None and (cache := config.get_timing_cache()) is not None:
        Path(request.timing_cache).write_bytes(bytes(memoryview(cache.serialize())))


def _fatal(warnings: list[str]) -> list[str]:
    return [w for w in warnings if not any(re.search(pattern, w) for pattern, _ in _HARMLESS)]


def _last_error(log: list[str]) -> str:
    errors = [line for line in log if line.startswith(("ERROR", "INTERNAL_ERROR"))]
    return " / ".join(errors[-3:])


def _ports(network: Any, side: str) -> Iterator[Port]:
    for index in range(getattr(network, f"num_{side}s")):
        tensor = getattr(network, f"get_{side}")(index)
        yield Port(name=tensor.name, dtype=_dtype(tensor.dtype), shape=tuple(tensor.shape))


def _dtype(dtype: Any) -> str:
    name = str(dtype).rsplit(".", maxsplit=1)[-1]
    return _DTYPES.get(name, name.lower())


def _layers(network: Any, what: str) -> Counter[str]:
    found: Counter[str] = Counter()
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        if what == "type":
            found[str(layer.type).rsplit(".", maxsplit=1)[-1]] += 1
        elif layer.num_outputs:
            found[_dtype(layer.get_output(0).dtype)] += 1
    return found


def _peak_memory() -> int | None:
    try:
        import resource
    except ImportError:  # not on Windows
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
