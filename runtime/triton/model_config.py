"""`config.pbtxt`: Triton's ModelConfig as nested mappings, and as the text it reads.

Names and types are those of `model_config.proto` in triton-inference-server/common.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headport.errors import UsageError
from headport.manifest import Port

__all__ = [
    "CONFIG",
    "GraphServing",
    "Instances",
    "Word",
    "check_name",
    "encode",
    "graph_tensors",
    "is_batched",
    "parameters",
    "tensor",
]

CONFIG = "config.pbtxt"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_TYPES = {  # of ONNX, as the manifest writes them → of Triton
    "float": "FP32",
    "float16": "FP16",
    "bfloat16": "BF16",
    "double": "FP64",
    "int64": "INT64",
    "int32": "INT32",
    "int8": "INT8",
    "uint8": "UINT8",
    "bool": "BOOL",
}


class Word(str):
    """An enum's member: written without quotes."""


@dataclass(frozen=True)
class Instances:
    """How many copies of a model run, and where."""

    count: int = 1
    gpus: tuple[int, ...] = ()  # none: on the CPU
    profiles: int = 0  # of a plan, all of which each copy uses; 0: it has none

    def message(self) -> dict[str, Any]:
        """As `instance_group` says it."""
        found: dict[str, Any] = {
            "count": self.count,
            "kind": Word("KIND_GPU" if self.gpus else "KIND_CPU"),
        }
        if self.gpus:
            found["gpus"] = list(self.gpus)
        if self.profiles > 1:
            found["profile"] = [str(index) for index in range(self.profiles)]
        return found


@dataclass(frozen=True)
class GraphServing:
    """How a graph without a state is served."""

    instances: Instances
    max_batch_size: int  # rows that Triton may join
    queue_delay_us: int  # how long it may wait for more, microseconds

    def message(
        self, name: str, inputs: Sequence[Port], outputs: Sequence[Port], batch: int | str
    ) -> dict[str, Any]:
        """What a model's configuration says of its tensors and of how they are joined.

        Args:
            name: Of the model.
            inputs: Of the graph.
            outputs: Of the graph.
            batch: How ports write the dimension that requests may be joined along.
        """
        batched = is_batched((*inputs, *outputs), batch)
        found = {
            "name": name,
            "max_batch_size": self.max_batch_size if batched else 0,
            "input": graph_tensors(inputs, batched=batched),
            "output": graph_tensors(outputs, batched=batched),
            "instance_group": [self.instances.message()],
        }
        delay = {"max_queue_delay_microseconds": self.queue_delay_us}
        return found | ({"dynamic_batching": delay} if batched else {})


def check_name(name: str) -> None:
    """Refuse a model's name that is no plain folder name; Triton's addresses hold it.

    Raises:
        UsageError: If it is not letters, digits, `_`, `.` and `-`, the first a letter or digit.
    """
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"--name {name!r}: letters, digits, '_', '.' and '-' were expected, the first a letter "
            "or a digit"
        )


def tensor(
    name: str, kind: str, dims: Sequence[int] = (1,), *, optional: bool = False
) -> dict[str, Any]:
    """One input or output; `kind` without its `TYPE_`, -1 in `dims` is any size."""
    found: dict[str, Any] = {"name": name, "data_type": Word(f"TYPE_{kind}"), "dims": list(dims)}
    return found | ({"optional": True} if optional else {})


def is_batched(ports: Iterable[Port], batch: int | str) -> bool:
    """Whether the first dimension of every port is the one that requests are joined along."""
    return all(port.shape and port.shape[0] == batch for port in ports)


def graph_tensors(ports: Iterable[Port], *, batched: bool) -> list[dict[str, Any]]:
    """A graph's ports as Triton declares them: without the batch, which it adds itself.

    Raises:
        UsageError: If a port has a type that Triton knows no tensors of.
    """
    ports = tuple(ports)
    unknown = [f"{port.name} ({port.dtype})" for port in ports if port.dtype not in _TYPES]
    if unknown:
        raise UsageError(
            f"tensors of {', '.join(_TYPES)} were expected, which Triton knows; found "
            f"{', '.join(unknown)}; use --backend python"
        )
    found = []
    for port in ports:
        sizes = port.shape[1:] if batched else port.shape
        dims = [size if isinstance(size, int) else -1 for size in sizes]
        each = tensor(port.name, _TYPES[port.dtype], dims or [1])
        # Triton declares no tensor without dimensions: it takes one number and drops its shape.
        found.append(each if dims else each | {"reshape": {"shape": []}})
    return found


def parameters(values: Mapping[str, object]) -> list[dict[str, Any]]:
    """Entries of the map `parameters`."""
    return [
        {"key": name, "value": {"string_value": str(value)}}
        for name, value in sorted(values.items())
    ]


def encode(message: Mapping[str, Any]) -> str:
    """A message in protobuf's text format.

    Args:
        message: Values are texts, `Word`s, numbers, truth values, messages, or lists of those.
    """
    return "\n".join(["# Written by `headport triton`.", *_lines(message)]) + "\n"


def _lines(message: Mapping[str, Any]) -> Iterator[str]:
    for name, value in message.items():
        if isinstance(value, list) and not any(isinstance(each, Mapping) for each in value):
            yield f"{name}: [ {', '.join(map(_scalar_text, value))} ]" if value else f"{name}: []"
            continue
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, Mapping):
                yield f"{name} {{"
                yield from (f"  {line}" for line in _lines(each))
                yield "}"
            else:
                yield f"{name}: {_scalar_text(each)}"


def _scalar_text(value: Any) -> str:
    if isinstance(value, Word):
        return str(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        for plain, escaped in (("\\", "\\\\"), ('"', '\\"'), ("\n", "\\n")):
            value = value.replace(plain, escaped)
        return f'"{value}"'
    return str(value)
