"""A plan, opened: arrays or device memory in, device memory out.

Element types and the profile that fits come from the engine itself, never from the bundle.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from headport.errors import EngineError
from headport.runtime.tensorrt.device import Device, Memory, nbytes
from headport.runtime.tensorrt.refit import refit

__all__ = ["OnDevice", "Plan"]

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class OnDevice:
    """A dense array that lies on the device."""

    memory: Memory
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def numpy(self, device: Device) -> Array:
        """A copy of it."""
        found: Array = np.empty(self.shape, self.dtype)
        device.download(self.memory.address, found)
        return found


class Plan:
    """One engine and its execution context.

    Args:
        trt: The backend's module.
        file: The plan.
        device: Where it runs.
        capture: Let the library record executions as CUDA graphs and replay them.
        carries_code: It was built to be loaded by later versions, and brings the code of its own.
        weights: The `.onnx` file that its weights are taken from; None: it holds them.

    Raises:
        EngineError: If the plan does not load or takes no weights, or the backend cannot record.
    """

    def __init__(
        self,
        trt: Any,
        file: Path,
        device: Device,
        *,
        capture: bool = False,
        carries_code: bool = False,
        weights: Path | None = None,
    ) -> None:
        self._trt = trt
        self._file = file
        self._device = device
        logger = _logger(trt)
        self._runtime = trt.Runtime(logger)
        if carries_code:
            self._runtime.engine_host_code_allowed = True
        self._engine = self._runtime.deserialize_cuda_engine(file.read_bytes())
        if self._engine is None:
            raise EngineError(f"{file.name}: the library does not load it; build it again")
        if weights is not None:
            refit(trt, self._engine, weights, logger)
        self._context = self._open(capture)
        names = [self._engine.get_tensor_name(i) for i in range(self._engine.num_io_tensors)]
        given = {n: self._engine.get_tensor_mode(n) == trt.TensorIOMode.INPUT for n in names}
        self.inputs = tuple(name for name in names if given[name])
        self.outputs = tuple(name for name in names if not given[name])
        self._dtypes: dict[str, np.dtype[Any]] = {
            n: np.dtype(trt.nptype(self._engine.get_tensor_dtype(n))) for n in names
        }
        self._uploads = {name: Memory(device) for name in self.inputs}
        self._profile = 0

    def _open(self, capture: bool) -> Any:
        if not capture:
            return self._engine.create_execution_context()
        strategy = getattr(self._trt, "CudaGraphStrategy", None)
        if strategy is None or not hasattr(self._engine, "create_runtime_config"):
            raise EngineError(f"{self._file.name}: this backend records no CUDA graphs")
        config = self._engine.create_runtime_config()
        config.cuda_graph_strategy = strategy.WHOLE_GRAPH_CAPTURE
        return self._engine.create_execution_context(config)

    def dtype(self, name: str) -> np.dtype[Any]:
        """Element type of an input or output."""
        return self._dtypes[name]

    def largest(self, name: str) -> tuple[int, ...]:
        """The largest shape that any profile takes of an input."""
        shapes = [
            self._engine.get_tensor_profile_shape(name, index)[2]
            for index in range(self._engine.num_optimization_profiles)
        ]
        return tuple(max(sizes) for sizes in zip(*map(tuple, shapes), strict=True))

    def fits(self, shapes: Mapping[str, tuple[int, ...]]) -> bool:
        """Whether some profile takes these shapes, of some or all inputs."""
        profiles = range(self._engine.num_optimization_profiles)
        return any(
            all(self._fits(name, shape, index) for name, shape in shapes.items())
            for index in profiles
        )

    def run(self, feeds: Mapping[str, Array | OnDevice]) -> dict[str, OnDevice]:
        """Run once; the outputs stay on the device.

        Raises:
            EngineError: If no profile takes these shapes, or the library refuses to run.
        """
        shapes = {name: tuple(feeds[name].shape) for name in self.inputs}
        self._choose(shapes)
        for name in self.inputs:
            if not self._context.set_input_shape(name, shapes[name]):
                raise EngineError(f"{self._file.name}: {name} of shape {shapes[name]} is refused")
            self._context.set_tensor_address(name, self._place(name, feeds[name]))
        outputs = {}
        for name in self.outputs:
            shape = tuple(self._context.get_tensor_shape(name))
            memory = Memory(self._device)
            address = memory.reserve(nbytes(shape, self._dtypes[name]))
            self._context.set_tensor_address(name, address)
            outputs[name] = OnDevice(memory, shape, self._dtypes[name])
        if not self._context.execute_async_v3(self._device.stream):
            raise EngineError(f"{self._file.name}: the library refuses to run it")
        return outputs

    def _place(self, name: str, given: Array | OnDevice) -> int:
        if isinstance(given, OnDevice):
            if given.dtype != self._dtypes[name]:
                raise EngineError(
                    f"{self._file.name}: {name} is {self._dtypes[name]}, {given.dtype} was given"
                )
            return given.memory.address
        array = np.ascontiguousarray(given, dtype=self._dtypes[name])
        address = self._uploads[name].reserve(array.nbytes)
        self._device.upload(address, array)
        return address

    def _choose(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        for index in (self._profile, *range(self._engine.num_optimization_profiles)):
            if all(self._fits(name, shape, index) for name, shape in shapes.items()):
                break
        else:
            listed = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
            raise EngineError(
                f"{self._file.name} was built for no such shapes: {listed}; build it again with "
                "--profile"
            )
        if index != self._profile:
            self._context.set_optimization_profile_async(index, self._device.stream)
            self._profile = index

    def _fits(self, name: str, shape: tuple[int, ...], index: int) -> bool:
        low, _, high = self._engine.get_tensor_profile_shape(name, index)
        return all(a <= size <= b for a, size, b in zip(low, shape, high, strict=True))


def _logger(trt: Any) -> Any:
    return trt.Logger(trt.Logger.ERROR)
