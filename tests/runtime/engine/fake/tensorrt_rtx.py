"""A stand-in for TensorRT-RTX: its names as far as headport uses them, on ONNX Runtime and the CPU.

A plan is one line of JSON and the constants of the graph. HEADPORT_FAKE makes it misbehave.
"""

from __future__ import annotations

import ctypes
import enum
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

__version__ = "1.7.1"


def fault() -> str:
    return os.environ.get("HEADPORT_FAKE", "")


class _Severity(enum.Enum):
    INTERNAL_ERROR = 0
    ERROR = 1
    WARNING = 2
    INFO = 3
    VERBOSE = 4


class ILogger:
    Severity = _Severity

    def __init__(self) -> None:
        pass


class Logger(ILogger):
    ERROR = _Severity.ERROR

    def __init__(self, level: Any) -> None:
        self.level = level


class NetworkDefinitionCreationFlag(enum.IntEnum):
    STRONGLY_TYPED = 0


class BuilderFlag(enum.Enum):
    TF32 = 0
    STRIP_PLAN = 1
    WEIGHT_STREAMING = 2


class ComputeCapability(enum.Enum):
    NONE = 0
    CURRENT = 1
    SM86 = 2
    SM89 = 3
    SM120 = 4


class MemoryPoolType(enum.Enum):
    WORKSPACE = 0


class TensorIOMode(enum.Enum):
    INPUT = 0
    OUTPUT = 1


class CudaGraphStrategy(enum.Enum):
    WHOLE_GRAPH_CAPTURE = 1


class DataType(enum.Enum):
    FLOAT = "float32"
    HALF = "float16"
    INT64 = "int64"
    INT8 = "int8"
    BOOL = "bool"


def nptype(dtype: DataType) -> Any:
    return np.dtype(dtype.value).type


class _Tensor:
    def __init__(self, value: ir.Value) -> None:
        self.name = value.name
        dtype = np.dtype("float32") if value.dtype is None else value.dtype.numpy()
        known = [member for member in DataType if member.value == dtype.name]
        self.dtype = known[0] if known else DataType.INT8
        dims = value.shape or ()
        self.shape = tuple(d if isinstance(d, int) else -1 for d in dims)
        if fault() == "static" and value.name == "hidden_states":
            self.shape = tuple(8 if d < 0 else d for d in self.shape)


class _Layer:
    def __init__(self, node: ir.Node) -> None:
        self.type = f"LayerType.{node.op_type.upper()}"
        self.num_outputs = len(node.outputs)
        self._node = node

    def get_output(self, index: int) -> _Tensor:
        return _Tensor(self._node.outputs[index])


class INetworkDefinition:
    path = ""
    model: Any = None

    @property
    def num_layers(self) -> int:
        return 0 if self.model is None or fault() == "empty" else len(self.model.graph)

    @property
    def num_inputs(self) -> int:
        return len(self.model.graph.inputs) if self.model is not None else 0

    @property
    def num_outputs(self) -> int:
        return len(self.model.graph.outputs) if self.model is not None else 0

    def get_layer(self, index: int) -> _Layer:
        return _Layer(self.model.graph[index])

    def get_input(self, index: int) -> _Tensor:
        return _Tensor(self.model.graph.inputs[index])

    def get_output(self, index: int) -> _Tensor:
        return _Tensor(self.model.graph.outputs[index])


class _Error:
    def code(self) -> str:
        return "ErrorCode.UNSUPPORTED_NODE"

    def desc(self) -> str:
        return "no kernel"

    def node_name(self) -> str:
        return "node_7"

    def node_operator(self) -> str:
        return "Frobnicate"


class OnnxParser:
    def __init__(self, network: INetworkDefinition, logger: Any) -> None:
        self._network = network
        self.num_errors = 0

    def parse_from_file(self, path: str) -> bool:
        if fault() == "parser":
            self.num_errors = 1
            return False
        self._network.path, self._network.model = path, ir.load(path)
        return True

    def get_error(self, index: int) -> _Error:
        return _Error()


class IOptimizationProfile:
    def __init__(self) -> None:
        self.shapes: dict[str, Any] = {}

    def set_shape(self, name: str, low: Any, usual: Any, high: Any) -> None:
        self.shapes[name] = [list(low), list(usual), list(high)]


class _Cache:
    def __init__(self, data: bytes) -> None:
        self._data = data

    def serialize(self) -> bytes:
        return b"timings" + self._data.removeprefix(b"timings")


class IBuilderConfig:
    num_compute_capabilities = 1

    def __init__(self) -> None:
        self.flags = {BuilderFlag.TF32}
        self.profiles: list[Any] = []
        self.capabilities: dict[int, str] = {}
        self.workspace: int | None = None
        self.cache: _Cache | None = None

    def set_flag(self, flag: BuilderFlag) -> None:
        self.flags.add(flag)

    def clear_flag(self, flag: BuilderFlag) -> None:
        self.flags.discard(flag)

    def get_flag(self, flag: BuilderFlag) -> bool:
        return flag in self.flags

    def set_memory_pool_limit(self, pool: Any, size: int) -> None:
        self.workspace = size

    def set_compute_capability(self, kind: ComputeCapability, index: int) -> bool:
        self.capabilities[index] = kind.name
        return fault() != "capability"

    def add_optimization_profile(self, profile: IOptimizationProfile) -> int:
        self.profiles.append(profile.shapes)
        return -1 if fault() == "profile" else len(self.profiles) - 1

    def create_timing_cache(self, data: bytes) -> _Cache | None:
        return None if data == b"garbage" else _Cache(data)

    def set_timing_cache(self, cache: _Cache, ignore_mismatch: bool) -> bool:
        self.cache = cache
        return True

    def get_timing_cache(self) -> _Cache | None:
        return self.cache


class Builder:
    def __init__(self, logger: Any) -> None:
        self._logger = logger

    def create_network(self, flags: int) -> INetworkDefinition:
        assert flags == 1
        return INetworkDefinition()

    def create_builder_config(self) -> IBuilderConfig:
        return IBuilderConfig()

    def create_optimization_profile(self) -> IOptimizationProfile:
        return IOptimizationProfile()

    def build_serialized_network(
        self, network: INetworkDefinition, config: IBuilderConfig
    ) -> bytes | None:
        if fault() == "hang":
            time.sleep(600)
        if fault() == "memory":
            held = bytearray(400 << 20)
            held[:: 1 << 12] = b"\1" * len(held[:: 1 << 12])
            time.sleep(600)
        if fault() == "abort":
            os.abort()
        if fault() == "builder":
            self._logger.log(_Severity.ERROR, "no implementation of node_7")
            return None
        if fault() == "unused":
            self._logger.log(_Severity.WARNING, "Unused Input: lengths")
        self._logger.log(_Severity.INFO, "built")
        head = {
            "model": network.path,
            "profiles": config.profiles,
            "targets": list(config.capabilities.values()),
            "workspace": config.workspace,
            "flags": sorted(flag.name for flag in config.flags),
        }
        if fault() == "path":  # two plans of one graph would differ
            head["clock"] = time.time()
        if BuilderFlag.STRIP_PLAN in config.flags:
            return json.dumps(head | {"model": ""}).encode() + b"\n"
        plan = json.dumps(head).encode() + b"\n"
        for value in network.model.graph.initializers.values():
            array = value.const_value.numpy()
            if fault() == "widen" and array.dtype == np.int8:
                array = array.astype(np.float16)
            plan += array.tobytes() if array.dtype == np.float16 else value.const_value.tobytes()
        return plan


class Runtime:
    def __init__(self, logger: Any) -> None:
        pass

    def deserialize_cuda_engine(self, plan: bytes) -> _Engine | None:
        try:
            return _Engine(json.loads(plan.split(b"\n", 1)[0]))
        except ValueError:
            return None


class Refitter:
    def __init__(self, engine: _Engine, logger: Any) -> None:
        self.engine = engine
        self.path = ""

    def get_missing_weights(self) -> list[str]:
        return [f"w{n}" for n in range(7)] if fault() == "missing" else []

    def refit_cuda_engine(self) -> bool:
        self.engine.load(self.path)
        return fault() != "refit"


class OnnxParserRefitter:
    def __init__(self, refitter: Refitter, logger: Any) -> None:
        self._refitter = refitter
        self.num_errors = 1

    def refit_from_file(self, path: str) -> bool:
        self._refitter.path = path
        return fault() != "foreign"

    def get_error(self, index: int) -> _Error:
        return _Error()


class _Engine:
    def __init__(self, head: dict[str, Any]) -> None:
        self._profiles = head["profiles"]
        self.num_optimization_profiles = len(self._profiles)
        if head["model"]:
            self.load(head["model"])

    def load(self, model: str) -> None:
        from headport.session import open_session

        self.session = open_session(Path(model), {})
        self._names = [*self.session.inputs, *self.session.outputs]
        self.num_io_tensors = len(self._names)

    def get_tensor_name(self, index: int) -> str:
        return self._names[index]

    def get_tensor_mode(self, name: str) -> TensorIOMode:
        given = name in self.session.inputs
        return TensorIOMode.INPUT if given else TensorIOMode.OUTPUT

    def get_tensor_dtype(self, name: str) -> DataType:
        return DataType(self.session.dtype(name).name)

    def create_runtime_config(self) -> Any:
        return IBuilderConfig()

    def get_tensor_profile_shape(self, name: str, index: int) -> Any:
        return [tuple(shape) for shape in self._profiles[index][name]]

    def create_execution_context(self, config: Any = None) -> _Context:
        return _Context(self)


class _Context:
    def __init__(self, engine: _Engine) -> None:
        self._engine = engine
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}
        self._profile = 0
        self._results: dict[str, Any] | None = None
        self.chosen: list[int] = []

    def set_optimization_profile_async(self, index: int, stream: int) -> bool:
        self._profile = index
        self.chosen.append(index)
        return True

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        low, _, high = self._engine.get_tensor_profile_shape(name, self._profile)
        self._shapes[name], self._results = shape, None
        return all(a <= d <= b for a, d, b in zip(low, shape, high, strict=True))

    def set_tensor_address(self, name: str, address: int) -> bool:
        assert address
        self._addresses[name] = address
        return True

    def _run(self) -> dict[str, Any]:
        if self._results is None:
            feeds = {n: self._read(n) for n in self._engine.session.inputs}
            self._results = self._engine.session.run(feeds)
        return self._results

    def _read(self, name: str) -> Any:
        dtype = self._engine.session.dtype(name)
        array = np.empty(self._shapes[name], dtype)
        ctypes.memmove(array.ctypes.data, self._addresses[name], array.nbytes)
        return array

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._run()[name].shape)

    def execute_async_v3(self, stream: int) -> bool:
        for name, array in self._run().items():
            given = np.ascontiguousarray(array)
            ctypes.memmove(self._addresses[name], given.ctypes.data, given.nbytes)
        return fault() != "execute"
