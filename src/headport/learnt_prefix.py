"""`prefix.safetensors` of a bundle: keys and values that every sequence begins with.

A model tuned by a learnt prefix or learnt prompt tokens reads them before anything else. What they
leave in the caches never changes, so it is stored instead of them: `past_key_values.N.key` and
`.value`, [KV heads, P, D] each, named and laid out as the backbone's cache inputs, float32 whatever
the bundle's type is. A sequence's own tokens come after, at positions P, P + 1, …
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load_file

from headport.bundle import Bundle
from headport.cache_ports import is_past
from headport.errors import BundleError
from headport.manifest import Port

__all__ = ["PREFIX_FILE", "LearntPrefix", "check_prefix", "read_prefix"]

PREFIX_FILE = "prefix.safetensors"
_TYPES = {"float": np.float32, "float16": np.float16}

Array = npt.NDArray[Any]


class LearntPrefix:
    """What the caches of new sequences hold.

    Args:
        tokens: P, 0 of a bundle without one.
        arrays: Cache input → [KV, P, D] in the port's type; empty where P is 0.
    """

    def __init__(self, tokens: int, arrays: Mapping[str, Array]) -> None:
        self.tokens = tokens
        self._arrays = arrays

    def rows(self, name: str, batch: int) -> Array:
        """What a cache input holds for each of B new sequences, [B, KV, P, D]."""
        return np.repeat(self._arrays[name][None], batch, axis=0)

    def fill(self, name: str, buffer: Array) -> Array:
        """Write it into the first P slots of every row of a cache input, [rows, KV, slots, D].

        Returns:
            The buffer.
        """
        if self.tokens:
            buffer[:, :, : self.tokens] = self._arrays[name]
        return buffer


def read_prefix(bundle: Bundle) -> LearntPrefix:
    """The learnt prefix of a bundle; one of no tokens where it has none.

    Raises:
        BundleError: If its file is missing, damaged or not for the bundle's backbone.
    """
    declared = bundle.manifest.prefix
    if declared is None:
        return LearntPrefix(0, {})
    inputs = bundle.manifest.backbone.inputs
    file = bundle.path / PREFIX_FILE
    try:
        tensors = load_file(file)
    except (SafetensorError, OSError) as error:
        raise BundleError(
            f"{file}: cannot be read ({error}); without it every answer would be another, write "
            "the bundle again"
        ) from error
    check_prefix(tensors, inputs, declared.tokens, file)
    ports = (port for port in inputs if is_past(port.name))
    arrays = {p.name: tensors[p.name].astype(_TYPES[p.dtype]) for p in ports}
    return LearntPrefix(declared.tokens, arrays)


def check_prefix(
    tensors: Mapping[str, Array], inputs: Sequence[Port], tokens: int, where: str | Path
) -> None:
    """Hold stored keys and values against the cache inputs that they are for.

    Args:
        tensors: Name → array.
        inputs: The backbone's.
        tokens: P.
        where: Names them in messages.

    Raises:
        BundleError: Naming all that is missing, unknown, of another shape, or not finite in the
            port's type.
    """
    ports = {port.name: port for port in inputs if is_past(port.name)}
    faults = [f"{name} is missing" for name in sorted(ports.keys() - tensors.keys())]
    faults += [f"{name} is no cache input" for name in sorted(tensors.keys() - ports.keys())]
    for name in sorted(ports.keys() & tensors.keys()):
        port, found = ports[name], tensors[name]
        expected = [port.shape[1], tokens, port.shape[3]] if len(port.shape) == 4 else None
        if list(found.shape) != expected:
            faults.append(f"{name} is {list(found.shape)}, {expected} was expected")
            continue
        with np.errstate(over="ignore"):
            if not np.isfinite(found.astype(_TYPES[port.dtype])).all():
                faults.append(f"{name} is not finite as {port.dtype}")
    if faults:
        raise BundleError(f"{where}: not what the backbone begins with: {'; '.join(faults)}")
