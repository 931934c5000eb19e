"""`condition.safetensors` of a bundle: what turns a condition into what hidden states get added.

    logits = head(hidden state + W c + b)

W [H, C] and b [H] were trained with the model (`headport.export.heads.ConditionProjection`); c [C]
is the condition. Conditions that do not change are stored by name. The product is NumPy's: it is
taken once per condition, not per token, and the same on every target.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load_file

from headport.bundle import Bundle
from headport.errors import BundleError, RequestError

__all__ = [
    "BIAS",
    "CONDITION_FILE",
    "FIXED",
    "WEIGHT",
    "Conditions",
    "open_conditions",
    "read_conditions",
]

Float32 = npt.NDArray[np.float32]

CONDITION_FILE = "condition.safetensors"
WEIGHT, BIAS, FIXED = "weight", "bias", "fixed."  # names of the tensors; fixed ones by their name


class Conditions:
    """A projection, and the vectors of its fixed conditions as far as they were asked for.

    Args:
        weight: W, [H, C].
        bias: b, [H].
        fixed: Name → condition c, [C].
    """

    def __init__(self, weight: Float32, bias: Float32, fixed: Mapping[str, Float32]) -> None:
        self._weight = weight
        self._bias = bias
        self._fixed = dict(fixed)
        self._cached: dict[str, Float32] = {}
        self._lock = threading.Lock()
        self.computed = 0  # products that were taken

    @property
    def size(self) -> int:
        """C, values of a condition."""
        return int(self._weight.shape[1])

    @property
    def names(self) -> tuple[str, ...]:
        """Of the fixed conditions."""
        return tuple(self._fixed)

    def vector(self, condition: Any) -> Float32:
        """What hidden states get added, [H]; of a fixed condition the very array of the first call.

        Args:
            condition: Name of a fixed condition, or its values, [C].

        Raises:
            RequestError: If the name is unknown, or values are of another number or not finite.
        """
        with self._lock:
            if not isinstance(condition, str):
                return self._product(self._checked(condition))
            if condition not in self._fixed:
                known = ", ".join(self._fixed) or "none"
                raise RequestError(f"no condition {condition!r} in this bundle; known are {known}")
            if condition not in self._cached:
                self._cached[condition] = self._product(self._fixed[condition])
            return self._cached[condition]

    def _product(self, values: Float32) -> Float32:
        self.computed += 1
        found: Float32 = self._weight @ values + self._bias
        return found

    def _checked(self, condition: Any) -> Float32:
        try:
            with np.errstate(over="ignore"):  # what float32 cannot hold is refused below
                values: Float32 = np.asarray(condition, np.float32)
        except (TypeError, ValueError):
            values = np.empty((), np.float32)
        if values.shape != (self.size,):
            found = list(values.shape) if values.ndim else repr(condition)
            raise RequestError(
                f"a condition is a name ({', '.join(self._fixed) or 'none is stored'}) or "
                f"{self.size} numbers, {found} was given"
            )
        if not np.isfinite(values).all():
            raise RequestError("a condition's values must be finite, NaN or infinity was given")
        return values


def open_conditions(bundle: Bundle) -> Conditions | None:
    """The conditions of a bundle; None where its model takes none.

    Raises:
        BundleError: If the file is damaged or is for another model.
    """
    if CONDITION_FILE not in bundle.manifest.files:
        return None
    return read_conditions(bundle.path / CONDITION_FILE, bundle.manifest.model.hidden_size)


def read_conditions(file: Path, hidden_size: int) -> Conditions:
    """Read a file of conditions.

    Args:
        file: As `headport.export.heads.save_condition` writes it.
        hidden_size: H of the model that it is for.

    Raises:
        BundleError: If it cannot be read, or its tensors do not fit together or the model.
    """
    try:
        tensors = load_file(file)
    except (SafetensorError, OSError) as error:
        raise BundleError(f"{file}: cannot be read ({error})") from error
    weight, bias = tensors.pop(WEIGHT, None), tensors.pop(BIAS, None)
    if weight is None or bias is None or weight.ndim != 2 or bias.shape != weight.shape[:1]:
        raise BundleError(
            f"{file}: {WEIGHT} [hidden size, condition size] and {BIAS} [hidden size] were "
            "expected; write it with headport.export.heads.save_condition"
        )
    if len(weight) != hidden_size:
        raise BundleError(
            f"{file}: it is for hidden states of {len(weight)} values, the model gives "
            f"{hidden_size}; it was trained with another model"
        )
    odd = [name for name, t in tensors.items() if not _is_fixed(name, t, weight.shape[1])]
    if odd:
        raise BundleError(
            f"{file}: {', '.join(odd)}: {FIXED}NAME [{weight.shape[1]}] was expected of every "
            "fixed condition"
        )
    found = {WEIGHT: weight, BIAS: bias, **tensors}
    broken = [name for name, tensor in found.items() if not np.isfinite(tensor).all()]
    if broken:
        raise BundleError(f"{file}: {', '.join(broken)} hold NaN or infinity")
    fixed = {name.removeprefix(FIXED): _float32(t) for name, t in tensors.items()}
    return Conditions(_float32(weight), _float32(bias), fixed)


def _is_fixed(name: str, tensor: npt.NDArray[Any], size: int) -> bool:
    return name.startswith(FIXED) and name != FIXED and tensor.shape == (size,)


def _float32(tensor: npt.NDArray[Any]) -> Float32:
    return tensor.astype(np.float32)
