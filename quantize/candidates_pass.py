"""Rewriting a quantised head so that it gives exact candidates instead of all logits.

                       ┌ scale, softcap ─────────────────────────► quantised_logits q
    a = product + b ───┤
                       └ + P·(‖x_1‖ … ‖x_K‖, 1) ─ scale, softcap ─► upper_bounds U
    ids  = the M best of U + noise, ascending;   cut = the (M+1)-th of U + noise
    z    = softcap(scale · (W[ids]·x + b[ids])) in float64, sorted, ties by lowest id
    certified_k = leading z that exceed cut, and each other, by more than rounding
    logsumexp   = ln(Σ exp z + (Σ exp q of all others))

W is the original weight. Without a certificate U is q and nothing is proved. A certified head
whose activations are `rounded` takes the product with x₁, x rounded in the graph, and P also
multiplies the norms of what x₁ lost. docs/exact-head.md says why each step is safe.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from headport.certificate import LARGEST_NORM, TANH_ERROR
from headport.lowering.emit import Emitter
from headport.lowering.rounding import RoundedActivations, round_activations
from headport.manifest import Head
from headport.quantize.certificate import Certificate

__all__ = ["CandidateSettings", "OriginalWeight", "add_candidates"]

Array = npt.NDArray[Any]

_SINGLE, _DOUBLE, _INT64 = ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.INT64
_NO_LIMIT = float(np.inf)
_UNIT = 2.0**-53  # unit roundoff of float64
_TANH_ERROR = 2.0**-46  # absolute, of ONNX Runtime's float64 Tanh; measured 1e-15


@dataclass(frozen=True)
class OriginalWeight:
    """What candidates are scored with."""

    weight: ir.TensorProtocol  # W [V, H], under the name the graph shall know it by
    bias: npt.NDArray[np.float32] | None  # b [V]


@dataclass(frozen=True)
class CandidateSettings:
    """What the graph is built for."""

    count: int  # M, at most V - 1
    block: int
    activations: str
    certificate: Certificate | None  # None: rescore only
    equal_rows: npt.NDArray[np.int64] | None  # lowest id of equal rows, [V]


def add_candidates(
    model: ir.Model,
    product: ir.Node,
    head: Head,
    original: OriginalWeight,
    settings: CandidateSettings,
) -> None:
    """Turn a quantised head that gives logits into one that gives candidates.

    Args:
        model: The head's graph; changed in place.
        product: Its Gemm(x, Ŵ, b?).
        head: Its manifest entry: scale, softcap.
        original: W and b.
        settings: Candidates and certificate.
    """
    graph = model.graph
    quantised = graph.outputs[0]
    quantised.name = "quantised_logits"
    last = ir.node("Identity", [quantised], name="candidates.end")
    graph.append(last)
    build = _Builder(graph, last, product, head, settings)
    noise = ir.Value(
        name="noise", type=ir.TensorType(_SINGLE), shape=ir.Shape(["noise_rows", "noise_ids"])
    )
    graph.inputs.append(noise)
    upper = build.upper_bounds(quantised)
    top, ids = build.select(upper, noise)
    z, error = build.exact_logits(ids, original)
    outputs = build.ranked(z, error, top, ids)
    outputs["logsumexp"] = build.logsumexp(outputs["candidate_logits"], quantised, ids)
    outputs["quantised_logits"] = quantised
    outputs["upper_bounds"] = upper
    graph.remove(last, safe=True)
    graph.outputs.clear()
    for name, value in outputs.items():
        _declare(value, name, settings.count, head.vocab_size)
        graph.outputs.append(value)


_PORTS: dict[str, tuple[ir.DataType, str | None]] = {
    "candidate_ids": (_INT64, "M"),
    "candidate_logits": (_DOUBLE, "M"),
    "logsumexp": (_DOUBLE, None),
    "certified_k": (_INT64, None),
    "cut": (_DOUBLE, None),
    "error": (_DOUBLE, None),
    "quantised_logits": (_SINGLE, "V"),
    "upper_bounds": (_SINGLE, "V"),
}


def _declare(value: ir.Value, name: str, count: int, vocab_size: int) -> None:
    kind, width = _PORTS[name]
    value.name = name
    value.type = ir.TensorType(kind)
    dims: list[str | int] = ["rows"]
    if width is not None:
        dims.append({"M": count, "V": vocab_size}[width])
    value.shape = ir.Shape(dims)


class _Builder:
    """Emits the parts of the graph; `[…]` gives the shape of what each returns."""

    def __init__(
        self,
        graph: ir.Graph,
        anchor: ir.Node,
        product: ir.Node,
        head: Head,
        settings: CandidateSettings,
    ) -> None:
        self._graph = graph
        self._emit = Emitter(graph, anchor, "candidates")
        self._product = product
        self._head = head
        self._settings = settings
        x = product.inputs[0]
        assert x is not None
        self._x = x
        self._rounded = self._round() if self._rounds() else None
        self._norm: ir.Value | None = None  # ‖x‖, [N, 1]

    def _rounds(self) -> bool:
        settings = self._settings
        return settings.certificate is not None and settings.activations == "rounded"

    def _round(self) -> RoundedActivations:
        """Give the product x₁ instead of x."""
        emit = Emitter(self._graph, self._product, "activations")
        rounded = round_activations(emit, self._x, self._x_width(), self._settings.block)
        self._product.replace_input_with(0, rounded.first)
        return rounded

    def _single(self, value: float) -> ir.Value:
        return self._emit.scalar(value, np.float32)

    def _double(self, value: float) -> ir.Value:
        return self._emit.scalar(value, np.float64)

    def _tensor(self, array: Array, name: str) -> ir.Value:
        value = ir.val(name, const_value=ir.tensor(array, name=name))
        self._graph.register_initializer(value)
        return value

    def _mapped(self, value: ir.Value, dtype: type[np.generic], name: str) -> ir.Value:
        """softcap(scale · value), increasing in value because scale > 0."""
        op, number = self._emit.op, self._emit.scalar
        if self._head.scale != 1.0:
            value = op("Mul", [value, number(self._head.scale, dtype)], f"{name}_scaled")
        if self._head.softcap is not None:
            cap = number(self._head.softcap, dtype)
            squashed = op("Tanh", [op("Div", [value, cap], f"{name}_ratio")], f"{name}_squashed")
            value = op("Mul", [squashed, cap], f"{name}_capped")
        return value

    def _reach(self) -> ir.Value:
        """What the bound's columns multiply, [N, C + 1]: norms of x's blocks, then 1."""
        op, ints = self._emit.op, self._emit.ints
        settings = self._settings
        assert settings.certificate is not None
        blocks = self._rounded.blocks if self._rounded else self._blocks()
        norms = op("ReduceL2", [blocks, ints(2)], "x_norms", keepdims=0)
        parts = [norms]
        if self._rounded:
            rest = op("Sub", [blocks, self._rounded.first_blocks], "x_rest")
            parts.append(op("ReduceL2", [rest, ints(2)], "x_losses", keepdims=0))
        norm = op("ReduceL2", [norms, ints(1)], "x_norm", keepdims=1)
        self._norm = norm
        if settings.certificate.bounds.shape[1] == len(parts) + 1:  # one column each: bound `row`
            parts = [norm] + [
                op("ReduceL2", [part, ints(1)], "x_loss", keepdims=1) for part in parts[1:]
            ]
        reach = parts[0]
        if len(parts) > 1:
            reach = op("Concat", parts, "x_parts", axis=1)
        return op("Pad", [reach, ints(0, 0, 0, 1), self._single(1.0)], "x_reach")

    def _blocks(self) -> ir.Value:
        op, ints = self._emit.op, self._emit.ints
        H, block = self._x_width(), self._settings.block
        count = -(-H // block)
        padded = self._x
        if count * block != H:
            padded = op("Pad", [self._x, ints(0, 0, 0, count * block - H)], "x_padded")
        return op("Reshape", [padded, ints(0, count, block)], "x_blocks")

    def _x_width(self) -> int:
        width = self._graph.inputs[0].shape
        assert width is not None and isinstance(width[1], int)
        return width[1]

    def upper_bounds(self, quantised: ir.Value) -> ir.Value:
        """No logit exceeds it, [N, V] float32. Without a certificate the quantised logits."""
        op = self._emit.op
        certificate = self._settings.certificate
        if certificate is None:
            return op("Identity", [quantised], "upper")
        bounds = self._tensor(certificate.bounds, "certificate.bounds")
        linear = op(
            "Gemm", [self._reach(), bounds, self._product.outputs[0]], "upper_linear", transB=1
        )
        upper = self._mapped(linear, np.float32, "upper")
        if self._head.softcap is not None:  # the cap's own arithmetic
            margin = float(self._head.softcap) * (TANH_ERROR + 2.0**-21)
            upper = op("Add", [upper, self._single(margin)], "upper_outward")
        return upper

    def select(self, upper: ir.Value, noise: ir.Value) -> tuple[ir.Value, ir.Value]:
        """The M + 1 best of upper + noise, [N, M + 1], and the ids of the M best, ascending."""
        op, ints = self._emit.op, self._emit.ints
        count = self._settings.count
        keys = op("Add", [upper, noise], "keys")
        best, ids = self._emit.ops("TopK", [keys, ints(count + 1)], ("best", "best_ids"))
        leading = op("Slice", [ids, ints(0), ints(count), ints(1)], "leading_ids")
        ascending, _ = self._emit.ops(
            "TopK", [leading, ints(count)], ("ids", "ids_order"), largest=0
        )
        return best, ascending

    def exact_logits(self, ids: ir.Value, given: OriginalWeight) -> tuple[ir.Value, ir.Value]:
        """Logits of the candidates in float64, [N, M], and how far each may be off, [N, 1]."""
        op, ints = self._emit.op, self._emit.ints
        weight, bias = given.weight, given.bias
        original = ir.val(weight.name or "", const_value=weight)
        self._graph.register_initializer(original)
        rows = op("Gather", [original, ids], "rows")
        wide = op("Cast", [rows], "rows_double", to=_DOUBLE)
        x = op("Cast", [self._x], "x_double", to=_DOUBLE)
        column = op("Unsqueeze", [x, ints(2)], "x_column")
        z = op("Squeeze", [op("MatMul", [wide, column], "dots"), ints(2)], "z_linear")
        largest_bias = 0.0
        if bias is not None:
            stored = self._tensor(bias.astype(np.float32), "candidates.bias")
            b = op("Cast", [op("Gather", [stored, ids], "b")], "b_double", to=_DOUBLE)
            z = op("Add", [z, b], "z_biased")
            largest_bias = float(np.abs(bias).max())
        return self._mapped(z, np.float64, "z"), self._exact_error(x, largest_bias)

    def _exact_error(self, x: ir.Value, largest_bias: float) -> ir.Value:
        # Products of two float32 numbers are exact in float64; sums of H + 1 of them are not.
        op, ints = self._emit.op, self._emit.ints
        settings = self._settings
        norm = op("ReduceL2", [x, ints(1)], "x_norm_double", keepdims=1)
        largest = settings.certificate.largest_norm if settings.certificate else 0.0
        steps = 2 * (self._x_width() + 16) * _UNIT * self._head.scale
        error = op("Mul", [norm, self._double(steps * largest)], "error_of_sums")
        rest = steps * largest_bias + 2.0**-900
        if self._head.softcap is not None:
            rest += self._head.softcap * _TANH_ERROR
        return op("Add", [error, self._double(rest)], "error_of_logits")

    def _first_of_equals(self, z: ir.Value, ids: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Logits, the same for all candidates with equal rows, and the lowest id of such rows."""
        op, ints = self._emit.op, self._emit.ints
        assert self._settings.equal_rows is not None
        table = self._tensor(self._settings.equal_rows, "certificate.equal_rows")
        firsts = op("Gather", [table, ids], "firsts")
        left = op("Unsqueeze", [firsts, ints(2)], "firsts_left")
        right = op("Unsqueeze", [firsts, ints(1)], "firsts_right")
        same = op("Equal", [left, right], "same_row")
        values = op("Unsqueeze", [z, ints(1)], "z_right")
        either = op("Where", [same, values, self._double(-np.inf)], "z_of_equals")
        return op("ReduceMax", [either, ints(2)], "z_first", keepdims=0), firsts

    def ranked(
        self, z: ir.Value, error: ir.Value, best: ir.Value, ids: ir.Value
    ) -> dict[str, ir.Value]:
        """Sorted candidates, the limit of all others, and how many ranks are proved."""
        op, ints = self._emit.op, self._emit.ints
        count = self._settings.count
        firsts = None
        if self._settings.equal_rows is not None:
            z, firsts = self._first_of_equals(z, ids)
        # Ids ascend, and TopK puts the lower position first among equal values.
        values, order = self._emit.ops("TopK", [z, ints(count)], ("z_sorted", "z_order"))
        ranked_ids = op("GatherElements", [ids, order], "ranked_ids", axis=1)
        flat_error = op("Squeeze", [error, ints(1)], "flat_error")
        outputs = {"candidate_ids": ranked_ids, "candidate_logits": values}
        if self._settings.certificate is None:
            outside = op("Mul", [flat_error, self._double(0.0)], "nothing")
            outputs["certified_k"] = op("Cast", [outside], "proved", to=_INT64)
            outputs["cut"] = op("Add", [outside, self._double(_NO_LIMIT)], "limit")
            outputs["error"] = flat_error
            return outputs
        last = op("Slice", [best, ints(count), ints(count + 1), ints(1)], "last_key")
        assert self._norm is not None
        sane = op("Less", [self._norm, self._single(LARGEST_NORM)], "sane")
        wide = op("Cast", [last], "last_key_double", to=_DOUBLE)
        cut = op("Where", [sane, wide, self._double(_NO_LIMIT)], "cut_column")
        above = op("Greater", [op("Sub", [values, error], "z_low"), cut], "above_cut")
        decided = self._decided(values, error, firsts, order)
        proved = op("And", [above, decided], "proved_each")
        failed = op("Cast", [op("Not", [proved], "open_each")], "failed", to=ir.DataType.INT32)
        ends = self._emit.scalar(1, np.int32)
        ended = op("Pad", [failed, ints(0, 0, 0, 1), ends], "failed_or_end")
        outputs["certified_k"] = op("ArgMax", [ended], "proved", axis=1, keepdims=0)
        outputs["cut"] = op("Squeeze", [cut, ints(1)], "limit")
        outputs["error"] = flat_error
        return outputs

    def _decided(
        self, values: ir.Value, error: ir.Value, firsts: ir.Value | None, order: ir.Value
    ) -> ir.Value:
        """Whether each candidate is proved to precede the next; the last one has none. [N, M]."""
        op, ints = self._emit.op, self._emit.ints
        count = self._settings.count
        upper = op("Slice", [values, ints(0), ints(count - 1), ints(1)], "z_upper")
        lower = op("Slice", [values, ints(1), ints(count), ints(1)], "z_lower")
        gap = op("Sub", [upper, lower], "gap")
        both = op("Mul", [error, self._double(2.0)], "error_of_gap")
        decided = op("Greater", [gap, both], "gap_decides")
        if firsts is not None:
            ranked = op("GatherElements", [firsts, order], "ranked_firsts", axis=1)
            left = op("Slice", [ranked, ints(0), ints(count - 1), ints(1)], "firsts_upper")
            right = op("Slice", [ranked, ints(1), ints(count), ints(1)], "firsts_lower")
            decided = op("Or", [decided, op("Equal", [left, right], "equal_rows")], "or_equal")
        flags = op("Cast", [decided], "decided_flags", to=ir.DataType.INT32)
        full = op(
            "Pad", [flags, ints(0, 0, 0, 1), self._emit.scalar(1, np.int32)], "decided_padded"
        )
        return op("Cast", [full], "decided", to=ir.DataType.BOOL)

    def logsumexp(self, values: ir.Value, quantised: ir.Value, ids: ir.Value) -> ir.Value:
        """Log of Σ exp of exact candidates and of all others' quantised logits, [N] float64."""
        op, ints = self._emit.op, self._emit.ints
        largest = op("Slice", [values, ints(0), ints(1), ints(1)], "z_largest")
        shift = op("Cast", [largest], "shift", to=_SINGLE)
        none = op("Mul", [op("Cast", [values], "z_single", to=_SINGLE), self._single(0.0)], "none")
        gone = op("Add", [none, self._single(-np.inf)], "minus_infinity")
        others = op("ScatterElements", [quantised, ids, gone], "others", axis=1)
        masses = op("Exp", [op("Sub", [others, shift], "shifted")], "masses")
        tail = op("ReduceSum", [masses, ints(1)], "tail", keepdims=1)
        wide_shift = op("Cast", [shift], "shift_double", to=_DOUBLE)
        exact = op("Exp", [op("Sub", [values, wide_shift], "z_shifted")], "exact_masses")
        head_mass = op("ReduceSum", [exact, ints(1)], "exact_mass", keepdims=1)
        mass = op("Add", [head_mass, op("Cast", [tail], "tail_double", to=_DOUBLE)], "mass")
        log = op("Add", [op("Log", [mass], "log_mass"), wide_shift], "log_of_sum")
        return op("Squeeze", [log, ints(1)], "logsumexp")
