"""Whether a certified head deserves trust on this machine: its kernel, its data, its answers.

The proof assumes that the kernel stays within `kernel_allowance`, that the stored bounds belong to
both weights, and that the original weight is the one candidates are scored with. All three are
looked at here, through the session that will run, against float64 from the tensor ledger:

    |q_v - (Ŵ_v·y + b_v)|         ≤  Σ_k D_vk ‖x_k‖ + c_v                       kernel
    U_v - (Ŵ_v·y + b_v)           ≥  Σ_k ‖E_vk‖ ‖x_k‖ + Σ_k ‖Ŵ_vk‖ ‖x_k - y_k‖   data
    candidate logits              =  W_v·x + b_v, each above all others         answers

y is x, or x₁ where activations are `rounded`.

Hidden states are chosen to break a kernel: every integer at its limit and of one sign, where sums
of pairs saturate; one huge channel; numbers below float32's normal range; zeros; large norms.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headport.bundle import SELFTEST_FILE, Bundle
from headport.certificate import (
    TANH_ERROR,
    block_norms,
    constant_slack,
    kernel_allowance,
    round_activations,
)
from headport.errors import BundleError
from headport.heads import HeadMethods
from headport.ledger import find_tensor, head_weight, read_tensor
from headport.manifest import Head
from headport.runner import Candidates, QuantisedLogits, Runner

__all__ = ["CertificateCheck", "check_certificate", "require_certificate"]

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]

_CHUNK_ELEMENTS = 1 << 21
_ALIGNED_ROWS = 3
_SAMPLED_ROWS = 2048  # at load; a kernel's faults do not pick rows
_ZERO_POINT = 128  # of the lowered weight
_UNIT = 2.0**-24


@dataclass(frozen=True)
class CertificateCheck:
    """How much of what the proof allows was used."""

    kernel_share: float  # largest |q - (Ŵ·x + b)| by what the kernel is allowed; ≤ 1
    bound_share: float  # largest share of U - (Ŵ·x + b) that the rounding of W needs; ≤ 1
    wrong_candidates: int  # proved ranks that float64 contradicts, and logits that are not exact
    logits: int  # compared

    def __bool__(self) -> bool:
        return bool(
            self.logits
            and self.kernel_share <= 1
            and self.bound_share <= 1
            and not self.wrong_candidates
        )

    def text(self) -> str:
        """One line for a terminal."""
        verdict = "holds" if bool(self) else "BROKEN"
        return (
            f"certificate {verdict}: kernel within "
            f"{self.kernel_share:.1%} of its allowance, bound used to {self.bound_share:.1%}, "
            f"{self.wrong_candidates} wrong candidates ({self.logits} logits)"
        )


def require_certificate(
    bundle: Bundle, runner: Runner, name: str = "lm", *, given: bool = False
) -> None:
    """Check a sample of rows, as at load time.

    Args:
        bundle: The bundle.
        runner: Runs it.
        name: The head.
        given: The runner comes from the caller, who answers for it; only the form is looked at.

    Raises:
        BundleError: If the head has no certificate, or it does not hold on this machine.
    """
    form = bundle.manifest.heads[name].candidates
    if form is None or not form.certified:
        found = "all logits" if form is None else "candidates without a certificate"
        raise BundleError(
            f"{bundle.path}: exact answers need a certified head, this one gives {found}; "
            "make the bundle with `headport quantize --head int8 --certify`"
        )
    if given:
        return
    check = check_certificate(bundle, runner, name, rows=_SAMPLED_ROWS)
    if not check:
        raise BundleError(
            f"{bundle.path}: head {name!r}: {check.text()}; this CPU or ONNX Runtime computes in "
            "another way than the proof assumes, or the bundle was changed"
        )


def check_certificate(
    bundle: Bundle, runner: Runner | HeadMethods, name: str = "lm", rows: int | None = None
) -> CertificateCheck:
    """Compare a certified head with float64.

    Args:
        bundle: The bundle.
        runner: Runs it, with the sessions that are to be trusted.
        name: The head.
        rows: Rows of the weight to look at, evenly spread; None for all.
    """
    weights = _Weights(bundle, name)
    probes = _probes(bundle, weights)
    quantised = runner.quantised(probes, name)
    output = runner.head(probes, name)
    assert output.candidates is not None
    step = 1 if rows is None else max(1, weights.V // rows)
    kernel, bound, compared, wrong = 0.0, 0.0, 0, 0
    for ids in weights.chunks(np.arange(0, weights.V, step)):
        part = _Part(weights, ids, probes.astype(np.float64))
        kernel = max(kernel, part.kernel_share(quantised.logits[:, ids]))
        bound = max(bound, part.bound_share(quantised, ids))
        wrong += part.above_their_rank(output.candidates)
        compared += len(probes) * len(ids)
    wrong += _inexact(weights, probes.astype(np.float64), output.candidates)
    return CertificateCheck(kernel, bound, wrong, compared)


class _Weights:
    """A certified head's tensors, by rows, in float64."""

    def __init__(self, bundle: Bundle, name: str) -> None:
        manifest = bundle.manifest
        self.head: Head = manifest.heads[name]
        form, quantization = self.head.candidates, self.head.quantization
        assert form is not None and quantization is not None and quantization.block is not None
        self.block, self.activations = quantization.block, quantization.activations
        entry, initializer = head_weight(manifest, self.head)
        self._stored = read_tensor(bundle, entry)
        stem = initializer.removesuffix(".nbits").removesuffix(".int8")
        self._scale = read_tensor(bundle, find_tensor(manifest, self.head.graph, f"{stem}.scale"))
        original = next((t for t in manifest.tensors if t.name == form.original), None)
        if original is None:
            raise BundleError(f"the tensor ledger has no weight {form.original!r}")
        self._original = read_tensor(bundle, original)
        self._bias = None
        if self.head.bias:
            consumer = find_tensor(manifest, self.head.graph, "candidates.bias")
            self._bias = read_tensor(bundle, consumer)
        self.V, self.H = self._original.shape

    def chunks(self, ids: Int64) -> Iterator[Int64]:
        """Ids in parts that fit the memory."""
        step = max(1, _CHUNK_ELEMENTS // self.H)
        for start in range(0, len(ids), step):
            yield ids[start : start + step]

    def scale(self, ids: Int64) -> Float64:
        """S, [n, K]."""
        return self._scale[ids].astype(np.float64)

    def rounded(self, ids: Int64) -> Float64:
        """Ŵ, [n, H]."""
        stored = self._stored[ids]
        if stored.dtype == np.uint8:  # [n, K, block], as the kernel wants it
            stored = stored.reshape(len(ids), -1)[:, : self.H].astype(np.int16) - _ZERO_POINT
        each = np.repeat(self.scale(ids), self.block, axis=1)[:, : self.H]
        return stored * each

    def original(self, ids: Int64) -> Float64:
        """W, [n, H]."""
        return self._original[ids].astype(np.float64)

    def bias(self, ids: Int64) -> Float64:
        """b, [n]."""
        if self._bias is None:
            return np.zeros(len(ids))
        return self._bias[ids].astype(np.float64)

    def mapped(self, linear: Float64) -> Float64:
        """softcap(scale · linear)."""
        logits = self.head.scale * linear
        if self.head.softcap is not None:
            logits = self.head.softcap * np.tanh(logits / self.head.softcap)
        return logits

    @property
    def map_error(self) -> float:
        """What the float32 softcap may be off by."""
        return (self.head.softcap or 0.0) * (TANH_ERROR + 2.0**-21)


class _Part:
    """Some rows of the weight and what float64 makes of them for every probe."""

    def __init__(self, weights: _Weights, ids: Int64, x: Float64) -> None:
        self._weights, self._ids = weights, ids
        rounded, original, scale = weights.rounded(ids), weights.original(ids), weights.scale(ids)
        block = weights.block
        norms = block_norms(rounded, block)
        bias = weights.bias(ids)
        given = x
        if weights.activations == "rounded":
            given = round_activations(x, block).astype(np.float64)
        self._linear = given @ rounded.T + bias
        self._exact = weights.mapped(x @ original.T + bias)
        lengths = block_norms(x, block)
        self._needed = lengths @ block_norms(original - rounded, block).T
        self._needed += block_norms(x - given, block) @ norms.T
        allowance = kernel_allowance(norms, scale, block, weights.H, weights.activations)
        self._allowed = lengths @ allowance.T
        b = bias if weights.head.bias else None
        self._allowed += constant_slack(norms + allowance, b, weights.H, scale.shape[1])

    def kernel_share(self, found: Float32) -> float:
        """Largest |q - float64| by what the kernel is allowed, [N, n] → scalar."""
        weights, slack = self._weights, self._weights.map_error
        low = weights.mapped(self._linear - self._allowed) - slack
        high = weights.mapped(self._linear + self._allowed) + slack
        centre = weights.mapped(self._linear)
        error = found.astype(np.float64) - centre
        share = np.where(error >= 0, error / (high - centre), error / (low - centre))
        return _largest(share)

    def bound_share(self, quantised: QuantisedLogits, ids: Int64) -> float:
        """Largest needed part of the bound, [N, n] → scalar; above 1 the bound is too small."""
        upper = quantised.upper_bounds[:, ids].astype(np.float64)
        base = self._weights.mapped(self._linear)
        # What the kernel was off by is the bound's to cover, and float64 rounds as well.
        needed = self._weights.mapped(self._linear + self._needed) - base
        slack = _UNIT * np.abs(upper) + 2.0**-140
        return _largest(needed / np.maximum(upper - base + slack, 2.0**-149))

    def above_their_rank(self, candidates: Candidates) -> int:
        """Tokens outside the proved ranks whose float64 logit is above the last proved one."""
        count = 0
        for n, k in enumerate(candidates.certified_k.tolist()):
            if k == 0:
                continue
            outside = ~np.isin(self._ids, candidates.ids[n, :k])
            limit = candidates.logits[n, k - 1] + 2 * candidates.error[n]
            count += int((self._exact[n, outside] > limit).sum())
        return count


def _inexact(weights: _Weights, x: Float64, candidates: Candidates) -> int:
    # Candidates' logits, and their order.
    count = 0
    for n, ids in enumerate(candidates.ids):
        exact = weights.mapped(weights.original(ids) @ x[n] + weights.bias(ids))
        error = 2 * candidates.error[n]
        count += int((~(np.abs(candidates.logits[n] - exact) <= error)).sum())
        count += int((np.diff(candidates.logits[n]) > 0).sum())
    return count


def _largest(share: Float64) -> float:
    return float(np.where(np.isnan(share), np.inf, share).max(initial=0.0))


def _probes(bundle: Bundle, weights: _Weights) -> Float32:
    H = weights.H
    rng = np.random.Generator(np.random.Philox(key=17))
    random: Float64 = rng.normal(size=(6, H))
    rows: list[Float64] = [*(random[:4] * [[1.0], [30.0], [1e-3], [1e6]])]
    rows += [np.zeros(H), np.full(H, 1e-41)]
    outlier, mixed = random[4], random[5]
    outlier[H // 2] = 3e3
    mixed[::3] *= 1e-39
    rows += [outlier, mixed]
    # All integers of a block at their limit: of the weight's sign, so that every product adds up.
    for row in np.linspace(0, weights.V - 1, _ALIGNED_ROWS).astype(np.int64):
        rounded = weights.rounded(np.array([row]))[0]
        rows += [np.where(rounded < 0, -1.0, 1.0), np.ones(H)]
    if weights.head.softcap is not None:  # else the cap would hide what the kernel does
        size = np.abs(weights.rounded(np.arange(0, weights.V, max(1, weights.V // 64)))).sum(axis=1)
        unit = weights.head.softcap / (weights.head.scale * (float(size.max()) or 1.0))
        rows = [row * min(1.0, unit) for row in rows]
    made = _as_the_graph_takes_them(bundle, weights.head, np.stack(rows))
    stored = _stored_states(bundle)
    return made if stored is None else np.concatenate([made, stored])


def _as_the_graph_takes_them(bundle: Bundle, head: Head, rows: Float64) -> Float32:
    """States of half precision are rounded, and kept in range, before they reach a graph."""
    [port] = [p for p in bundle.manifest.graphs[head.graph].inputs if p.name == "hidden_states"]
    if port.dtype != "float16":
        return rows.astype(np.float32)
    largest = float(np.finfo(np.float16).max)
    return np.clip(rows, -largest, largest).astype(np.float16).astype(np.float32)


def _stored_states(bundle: Bundle) -> Float32 | None:
    from safetensors.numpy import load_file

    file = bundle.path / SELFTEST_FILE
    if not file.is_file():
        return None
    states: Float32 = load_file(file)["hidden_states"][:4].astype(np.float32)
    return states
