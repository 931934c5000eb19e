"""Some rows of a head's weight, wherever and however a bundle stores them.

    Ŵ[t] = W[t]                              fp32, fp16, bf16
    Ŵ[t] = (Q[t] − Z[t]) · S[t]              integers and fp8, one scale per row or block;
                                             plain, or packed for an 8-bit or 4-bit kernel

Rows come from the bundle's tensors, mapped from their files: nothing but the rows is read. Integers
are restored in float32 as DequantizeLinear does it, so that rows have the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from headport.bundle import Bundle
from headport.errors import BundleError
from headport.head_parts import find_head
from headport.ledger import find_tensor, head_weight, read_rows
from headport.manifest import Head, Manifest, Tensor

__all__ = ["GatheredRows", "HeadRows"]

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]
Array = npt.NDArray[Any]

_UNIT = 2.0**-24  # rounding of a float32 operation, relative
_PACKED = ".nbits"
_BYTE_STEPS = 127  # of a block's activations in an 8-bit kernel


@dataclass(frozen=True)
class GatheredRows:
    """Rows of n tokens, ready to be multiplied with: logits = softcap(scale · (Ŵ x + b))."""

    weight: Float32  # [n, H]
    bias: Float32 | None  # [n]
    scale: float
    softcap: float | None

    def logits(self, hidden_states: Float32) -> Float32:
        """Logits [N, n] of hidden states [N, H], in float32."""
        found: Float32 = hidden_states @ self.weight.T
        if self.bias is not None:
            found += self.bias
        if self.scale != 1.0:
            found *= np.float32(self.scale)
        if self.softcap is not None:
            cap = np.float32(self.softcap)
            found = np.tanh(found / cap) * cap
        return found

    def error_bound(self, hidden_states: Float32, activation_block: int = 0) -> Float64:
        """How far float32 logits may be apart that are summed in other orders, [N, n].

            |Δ| ≤ |scale| · 2 γ · (Σ_h |x_h Ŵ_h| + |b|) + 8 u |logit|,  γ = 2 H u / (1 − 2 H u)

        (Higham 2002, section 3.1; 2 H operations, because a kernel may restore weights inside its
        sum; softcap moves no two values apart). A kernel that rounds what is left of activations
        after a first rounding adds, per block k, max|x_k| / (2 · 127²) · Σ_h |Ŵ_h|.

        Args:
            hidden_states: x, [N, H].
            activation_block: Activations that such a kernel rounds together; 0 = none.
        """
        x, w = np.abs(hidden_states.astype(np.float64)), np.abs(self.weight.astype(np.float64))
        steps = 2 * x.shape[1] * _UNIT
        size = x @ w.T + (0.0 if self.bias is None else np.abs(self.bias.astype(np.float64)))
        bound = 2 * steps / (1 - steps) * size
        if activation_block:
            starts = np.arange(0, x.shape[1], activation_block)
            largest = np.maximum.reduceat(x, starts, axis=1)
            bound += largest / (2 * _BYTE_STEPS**2) @ np.add.reduceat(w, starts, axis=1).T
        found: Float64 = abs(self.scale) * bound + 8 * _UNIT * np.abs(self.logits(hidden_states))
        return found


class HeadRows:
    """Gathers rows of one head. Of a head that gives candidates these are the original ones.

    Args:
        bundle: Holds the head.
        name: The head, or the part of one.

    Raises:
        BundleError: If the bundle's ledger does not hold what a row is made of.
    """

    def __init__(self, bundle: Bundle, name: str) -> None:
        manifest, self.head = bundle.manifest, find_head(bundle.manifest, name)
        self._bundle = bundle
        self.graph, weight, self._weight_name = _weight(manifest, self.head)
        self._weight = weight
        self._bias = self._find_bias()
        self.activation_block = self._activation_block()
        port = next(p for p in manifest.graphs[self.graph].inputs if p.name == "hidden_states")
        self._is_half = port.dtype == "float16"
        self._states_width = int(port.shape[1])
        kind = "packed" if self._weight_name.endswith(_PACKED) else weight.dtype
        if kind not in _GATHER:
            raise BundleError(
                f"{weight.name}: rows of a weight stored as {kind} cannot be gathered"
            )
        self._gather = _GATHER[kind]

    def states(self, hidden_states: Float32) -> Float32:
        """Hidden states as the head's graph is given them: rounded where it takes float16."""
        found = np.ascontiguousarray(hidden_states, np.float32)
        return found.astype(np.float16).astype(np.float32) if self._is_half else found

    def gather(self, columns: Int64) -> GatheredRows:
        """The rows of some of the head's columns, [n]."""
        # A packed row is filled up to whole blocks.
        weight = self._gather(self, columns)[:, : self._states_width]
        return GatheredRows(
            weight=np.ascontiguousarray(weight, np.float32),
            bias=None if self._bias is None else self._rows(self._bias, columns),
            scale=self.head.scale,
            softcap=self.head.softcap,
        )

    def _rows(self, tensor: Tensor, columns: Int64) -> Array:
        return read_rows(self._bundle, tensor, columns)

    def _find_bias(self) -> Tensor | None:
        if not self.head.bias:
            return None
        prefix, shape = f"{self.graph}:", (self.head.vocab_size,)
        found = [
            tensor
            for tensor in self._bundle.manifest.tensors
            if (tensor.dtype, tensor.shape) == ("float", shape)
            and any(c.startswith(prefix) and not c.endswith(".scale") for c in tensor.consumers)
        ]
        if len(found) != 1:  # a short one lies inside the graph
            raise BundleError(f"the tensor ledger has no bias of {self.graph}")
        return found[0]

    def _activation_block(self) -> int:
        how = self.head.quantization
        if how is None or self.head.candidates is not None or how.activations == "exact":
            return 0
        if not self._weight_name.endswith(_PACKED) or self._bundle.manifest.target != "ort-cpu":
            return 0
        if how.activations == "rounded":
            raise BundleError("the head's kernel rounds activations; rows alone would differ")
        return self._block

    @property
    def _bits(self) -> int:
        return 4 if self.head.quantization and self.head.quantization.format == "int4" else 8

    @property
    def _block(self) -> int:
        return int(self._weight.shape[2]) * 8 // self._bits

    def _beside(self, suffix: str) -> Tensor | None:
        """What belongs to the weight under the name without its format, such as its scale."""
        stem = self._weight_name.removesuffix(_PACKED).rsplit(".", 1)[0]
        try:
            return find_tensor(self._bundle.manifest, self.graph, f"{stem}.{suffix}")
        except BundleError:
            return None

    def _scales(self, columns: Int64) -> Float32:
        scale = self._beside("scale")
        if scale is None:
            raise BundleError(f"the tensor ledger has no scale of {self._weight.name}")
        return self._rows(scale, columns).reshape(len(columns), -1)  # [n, blocks]

    def _plain(self, columns: Int64) -> Array:
        return self._rows(self._weight, columns)

    def _restored(self, columns: Int64) -> Array:
        values = self._rows(self._weight, columns)
        zero = self._beside("zero")
        if zero is not None:
            zeros = self._rows(zero, columns).reshape(len(columns), -1).astype(np.int16)
            values = values - _spread(zeros, values.shape[1], self._stored_block)
        scales = _spread(self._scales(columns), values.shape[1], self._stored_block)
        restored: Array = values.astype(np.float32) * scales
        return restored

    @property
    def _stored_block(self) -> int:
        how = self.head.quantization
        return (how.block if how is not None else None) or self._weight.shape[1]

    def _unpacked(self, columns: Int64) -> Array:
        packed = self._rows(self._weight, columns)  # [n, K, block · bits / 8]
        count = packed.shape[1]
        values = _codes(packed.reshape(len(columns), -1), self._bits)
        zero = self._beside("zero")
        zeros: Any = np.int16(1 << (self._bits - 1))
        if zero is not None:
            stored = self._rows(zero, columns).reshape(len(columns), -1)
            zeros = _spread(_codes(stored, self._bits)[:, :count], values.shape[1], self._block)
        scales = _spread(self._scales(columns), values.shape[1], self._block)
        restored: Array = (values - zeros).astype(np.float32) * scales
        return restored


def _weight(manifest: Manifest, head: Head) -> tuple[str, Tensor, str]:
    """Graph, ledger entry and name in the graph of what full logits are made with."""
    form = head.candidates
    if form is None:
        return head.graph, *head_weight(manifest, head)
    for tensor in manifest.tensors:
        prefix = f"{form.full}:"
        names = [c.removeprefix(prefix) for c in tensor.consumers if c.startswith(prefix)]
        if tensor.name == form.original and names:
            return form.full, tensor, names[0]
    raise BundleError(f"the tensor ledger has no weight {form.original!r} that {form.full} reads")


def _codes(packed: Array, bits: int) -> npt.NDArray[np.int16]:
    """[n, m] bytes → [n, m · 8 / bits], the lower half first."""
    if bits == 8:
        return packed.astype(np.int16)
    found = np.stack([packed & 15, packed >> 4], axis=-1).astype(np.int16)
    return found.reshape(len(packed), -1)


def _spread(per_block: Array, width: int, block: int) -> Array:
    """[n, blocks] → [n, width]; the last block may be short."""
    if per_block.shape[1] == 1:
        return per_block
    spread: Array = np.repeat(per_block, block, axis=1)[:, :width]
    return spread


# Element type of the stored weight → how its rows are read.
_GATHER: dict[str, Callable[[HeadRows, Int64], Array]] = {
    "float": HeadRows._plain,
    "float16": HeadRows._plain,
    "bfloat16": HeadRows._plain,
    "int8": HeadRows._restored,
    "int4": HeadRows._restored,
    "uint4": HeadRows._restored,
    "float8e4m3fn": HeadRows._restored,
    "packed": HeadRows._unpacked,
}
