"""The check after quantising: the written head, as ONNX Runtime runs it, against float64.

The reference starts from the original bundle's tensor ledger and the formula, in NumPy and with
none of the code that wrote the head, so a wrong axis, swapped scales, a row left out or a block
size that was recorded but not used cannot agree with it. Weights whose errors were compensated
have no formula: they are read back from the written ledger, and each row's loss has a limit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from headport.bundle import Bundle
from headport.certificate import round_activations, rounds_in_graph
from headport.errors import ParityError
from headport.head_parts import find_head
from headport.ledger import head_weight, read_tensor
from headport.manifest import Head, Quantization
from headport.quantize.calibration import Calibration
from headport.quantize.formulas import rounded_weight, stored_scale, stored_weight
from headport.session import SessionSettings, open_session
from headport.static_rounding import is_static, round_statically, static_step

__all__ = ["HeadCheck", "check_head"]

Float64 = npt.NDArray[np.float64]

_LONG = 1024  # channels from which a hidden state is also probed in pieces
_SLICE = 256
_LARGEST_LOSS = 8.0  # of a compensated row, in losses of nearest rounding; measured at most 2.2
_ROWS = 4  # random hidden states per magnitude
# Behind a softcap a large logit hides its error and a small one drowns in the cap's rounding.
_MAGNITUDES = (1.0, 2.0**-6, 2.0**-12)
_CHUNK_ELEMENTS = 1 << 22
_UNIT_ROUNDOFF = 2.0**-24  # of float32
_SMALLEST = 2.0**-149  # of float32
_SMALLEST_NORMAL = 2.0**-126


@dataclass(frozen=True)
class HeadCheck:
    """How far the written head is from the float64 reference."""

    max_abs_logit_error: float  # logits
    largest_share_of_bound: float  # |Δ| divided by the fp32 rounding bound of its logit; ≤ 1
    logits: int  # compared

    def __bool__(self) -> bool:
        return self.logits > 0 and self.largest_share_of_bound <= 1.0


def check_head(
    source: Bundle,
    written: Bundle,
    bias: npt.NDArray[np.float32] | None,
    *,
    name: str = "lm",
    calibration: Calibration | None = None,
    settings: SessionSettings | None = None,
) -> HeadCheck:
    """Compare the written head with softcap(scale · (Ŵ x + b)) in float64, on every row of Ŵ.

    A logit may differ by what float32 arithmetic explains: with u = 2⁻²⁴ and H products,

        bound[v] = |scale| · (4 √H + 8) · u · (Σ_h |x_h| |Ŵ[v, h]| + |b[v]|) + 8 · u · |logit|

    the probabilistic bound for sums with λ = 4 (Higham and Mary 2019, doi:10.1137/18M1226312),
    which the softcap, whose slope is at most 1, does not enlarge. A single weight that is off by
    one step exceeds it: states longer than 1,024 channels are also probed in slices of 256, because
    the bound grows with their number.

    Args:
        source: The bundle before quantising; holds the original weight.
        written: The bundle after it, as it lies on disk.
        bias: b [V] of the original head, None where it has none.
        name: The head, or the part of one.
        calibration: What its rounding was compensated for; None where it is rounded to nearest.
        settings: Session settings.

    Returns:
        The comparison; true if every logit is within its bound.

    Raises:
        ParityError: If one is not, or a logit is not finite.
    """
    head = find_head(written.manifest, name)
    quantization = head.quantization
    if quantization is None:
        raise ParityError("the written head is not quantised although it was asked for")
    entry, _ = head_weight(source.manifest, find_head(source.manifest, name))
    weight = read_tensor(source, entry)
    graph = written.manifest.graphs[head.graph]
    session = open_session(written.path / graph.file, written.manifest.session_options, settings)
    probes = _probes(weight, head).astype(session.dtype("hidden_states"))
    feeds: dict[str, npt.NDArray[Any]] = {"hidden_states": probes}
    wanted = "logits"
    if head.outputs == "candidates":
        feeds["noise"], wanted = np.zeros((1, 1), np.float32), "quantised_logits"
    found = session.run(feeds, [wanted])[wanted].astype(np.float64)
    if found.shape != (len(probes), len(weight)):
        raise ParityError(
            f"the written head gives logits of shape {found.shape}, "
            f"{(len(probes), len(weight))} was expected"
        )
    x = probes.astype(np.float64)
    if is_static(head):
        x = round_statically(probes, static_step(written, head)).astype(np.float64)
    elif rounds_in_graph(head):
        assert quantization.block is not None
        x = round_activations(probes, quantization.block).astype(np.float64)
    worst, share = 0.0, 0.0
    step = max(1, _CHUNK_ELEMENTS // weight.shape[1])
    for start in range(0, len(weight), step):
        rows = slice(start, start + step)
        part = None if bias is None else bias[rows]
        if quantization.rounding == "nearest":
            scale = stored_scale(written, head, rows) if quantization.format == "int4" else None
            rounded = rounded_weight(weight[rows], quantization, scale)
        else:
            rounded = stored_weight(written, head, rows)
            _check_losses(weight[rows], rounded, quantization, calibration, start)
        expected, bound = _reference(x, rounded, part, head)
        error = np.abs(found[:, rows] - expected)
        ratio = np.where(np.isfinite(error), error / bound, np.inf)
        if ratio.max() > 1:
            _refuse(ratio.max(axis=0), start, error.max(axis=0))
        worst, share = max(worst, float(error.max())), max(share, float(ratio.max()))
    return HeadCheck(worst, share, found.size)


def _check_losses(
    weight: npt.NDArray[Any],
    rounded: Float64,
    quantization: Quantization,
    calibration: Calibration | None,
    start: int,
) -> None:
    """Compensated rounding has no formula; what it may lose on its own text has a limit."""
    assert calibration is not None
    nearest = rounded_weight(weight, quantization)
    exact = weight.astype(np.float64)
    losses = [
        np.einsum("vi,vi->v", error @ calibration.gram, error)
        for error in (exact - rounded, exact - nearest)
    ]
    # Of a zero row, or one that the grid holds exactly, nothing may be lost but rounding.
    least = 1e-12 * np.einsum("vi,vi->v", exact @ calibration.gram, exact)
    ratio = losses[0] / np.maximum(_LARGEST_LOSS * losses[1], np.maximum(least, 1e-300))
    if ratio.max() > 1:
        row = int(ratio.argmax())
        raise ParityError(
            f"the written head's row {start + row} loses {losses[0][row]:.3g} on the calibration "
            f"text, more than {_LARGEST_LOSS} times what nearest rounding does "
            f"({losses[1][row]:.3g}); nothing was written"
        )


def _refuse(ratio: Float64, start: int, error: Float64) -> None:
    row = int(ratio.argmax())
    raise ParityError(
        f"the written head does not multiply with the rounded weight: {int((ratio > 1).sum())} of "
        f"{len(ratio)} rows from {start} differ by more than rounding explains, most of all row "
        f"{start + row} (|Δlogit| {error[row]:.3g}, {ratio[row]:.3g} times its bound); "
        "nothing was written"
    )


def _probes(weight: npt.NDArray[Any], head: Head) -> Float64:
    # Logits of about 1, or half the softcap, at the first magnitude; and one row of zeros, which
    # shows the bias alone.
    H = weight.shape[1]
    sample = weight[:: max(1, len(weight) // 1024)].astype(np.float64)
    size = float(np.sqrt(np.square(sample).mean())) * np.sqrt(H) * (abs(head.scale) or 1.0)
    unit = min(1.0, (head.softcap or 2.0) / 2) / (size or 1.0)
    rng = np.random.Generator(np.random.Philox(key=11))
    rows = [rng.normal(size=(_ROWS, H)) * unit * magnitude for magnitude in _MAGNITUDES]
    return np.concatenate([*rows, np.zeros((1, H)), *_slices_of(rows[0][:1])])


def _slices_of(row: Float64) -> list[Float64]:
    """A long state in pieces: one step of one weight would drown in the rounding of all of it."""
    H = row.shape[1]
    if H <= _LONG:
        return []
    # Of one size everywhere, so that no channel hides.
    even, piece = np.sign(row) * float(np.abs(row).mean()), np.arange(H) // _SLICE
    return [np.where(piece == n, even, 0.0) for n in range(-(-H // _SLICE))]


def _reference(
    x: Float64, rounded: Float64, bias: npt.NDArray[np.float32] | None, head: Head
) -> tuple[Float64, Float64]:
    """Logits [N, V] of some rows of the weight, and how far float32 may be from each."""
    b = np.zeros(len(rounded)) if bias is None else bias.astype(np.float64)
    logits = head.scale * (x @ rounded.T + b)
    if head.softcap is not None:
        logits = head.softcap * np.tanh(logits / head.softcap)
    terms = 4 * np.sqrt(rounded.shape[1]) + 8
    size = np.abs(x) @ np.abs(rounded).T + np.abs(b)
    bound = abs(head.scale) * terms * (_UNIT_ROUNDOFF * size + _SMALLEST)
    # Softcap's operators may flush what lies below the normal range.
    least = _SMALLEST if head.softcap is None else _SMALLEST_NORMAL
    return logits, bound + 8 * _UNIT_ROUNDOFF * np.abs(logits) + least
