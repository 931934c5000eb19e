"""A hunt for false certificates: heads and hidden states made to deceive, against float64.

Each head is written as a bundle, quantised and lowered by the product's own code, and run by ONNX
Runtime; nothing here looks inside the graph. A row counts as false if a proved rank is not that of
float64 logits (ties by lowest id), a candidate's logit is not exact, a token that is no
candidate lies above the cut, with noise and without, or an upper bound lies below its logit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from headport.bundle import Bundle
from headport.runner import Candidates, Runner, open_runner
from headport.session import SessionSettings

__all__ = ["CASES", "HeadCase", "Truth", "adversarial_states", "count_false", "hunt", "make_heads"]

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
_ROWS = 256


@dataclass(frozen=True)
class HeadCase:
    """One head: shape, recipe, and what follows the product."""

    V: int = 251
    H: int = 61
    block: int = 16
    activations: str = "residual"
    bound: str = "block"
    bias: bool = False
    scale: float = 1.0
    softcap: float | None = None
    tied: bool = False
    count: int = 24


CASES = (
    HeadCase(),
    HeadCase(bias=True, bound="row"),
    HeadCase(V=509, H=127, block=32, tied=True),
    HeadCase(activations="rounded", bias=True, tied=True),
    HeadCase(activations="rounded", bound="row", block=64),
    HeadCase(activations="exact", block=256, bound="row", scale=0.25),
    HeadCase(V=127, H=320, block=64, softcap=30.0, scale=0.5, tied=True),
    HeadCase(V=127, H=67, softcap=2.0, bias=True, activations="rounded"),
    HeadCase(V=67, H=31, block=32, count=66, scale=3.0),
)


@dataclass(frozen=True)
class Truth:
    """The original head in float64; equal rows share one value."""

    weight: Float32  # [V, H]
    bias: Float32 | None
    scale: float
    softcap: float | None

    def logits(self, states: Float32) -> Float64:
        """[N, H] → [N, V]."""
        z: Float64 = states.astype(np.float64) @ self.weight.astype(np.float64).T
        if self.bias is not None:
            z += self.bias
        z *= self.scale
        if self.softcap is not None:
            z = self.softcap * np.tanh(z / self.softcap)
        rows = self.weight if self.bias is None else np.c_[self.weight, self.bias]
        _, first, inverse = np.unique(rows, axis=0, return_index=True, return_inverse=True)
        return z[:, first[inverse.ravel()]]


def make_heads(
    case: HeadCase, folder: Path, seed: int = 0, kernels: Path | None = None
) -> tuple[Truth, tuple[Bundle, ...]]:
    """The head in float64, and its certified bundle: portable, lowered, and for own kernels."""
    from headport.lowering import Options as LowerOptions
    from headport.lowering import lower
    from headport.quantize import Options, quantize
    from tests.toy_bundles import write_toy

    weight = _weight(case, np.random.default_rng(seed))
    bias = np.linspace(-1, 1, case.V).astype(np.float32) if case.bias else None
    if bias is not None:
        bias[_TWINS[1]] = bias[_TWINS[0]]
    truth = Truth(weight, bias, case.scale, case.softcap)
    source = write_toy(
        folder / "fp32",
        weight,
        bias=bias,
        scale=case.scale,
        softcap=case.softcap,
        tied=case.tied,
    )
    options: dict[str, Any] = {
        "block": case.block,
        "activations": case.activations,
        "bound": case.bound,
        "rescore": case.count,
    }
    portable = quantize(
        Options(bundle=source.path, output=folder / "int8", head="int8", certify=True, **options)
    )
    made = [portable]
    for name, library in {"cpu": None, **({"own": kernels} if kernels else {})}.items():
        asked = LowerOptions(bundle=portable.path, output=folder / name, target="ort-cpu")
        made.append(lower(asked.__replace__(kernels=library)))
    return truth, tuple(made)


_TWINS = (5, 40)  # rows that are equal bit for bit


def _weight(case: HeadCase, rng: np.random.Generator) -> Float32:
    weight: Float32 = rng.normal(size=(case.V, case.H)).astype(np.float32)
    weight[:, 3] *= 40  # an outlier channel
    weight[10:20] = weight[9] * (1 + rng.normal(size=(10, case.H)) * 1e-7)  # near ties
    weight[20:24] = weight[9] + rng.normal(size=(4, case.H)) * 1e-3
    weight[24] *= 1e6
    weight[25] *= 1e-41  # below float32's normal range
    weight[26] *= 1e-30
    weight[27:29] = 0
    weight[29, 1:] = 0
    weight[_TWINS[1]] = weight[_TWINS[0]]
    return weight


def adversarial_states(weight: Float32, count: int, rng: np.random.Generator) -> Float32:
    """Hidden states of many kinds in turn, [count, H]."""
    H = weight.shape[1]
    x = rng.normal(size=(count, H)) * 10.0 ** rng.uniform(-3, 3, (count, 1))
    wide = weight.astype(np.float64)
    usual = np.r_[0:24, 30 : len(weight)]  # without rows of extreme norm
    left, right = rng.choice(usual, count), rng.choice(usual, count)
    kinds = np.arange(count) % 11
    near = kinds == 1  # along a row, so that near ties and twins come out on top
    x[near] = wide[left[near]] * rng.uniform(0.5, 2, (near.sum(), 1)) + 0.01 * x[near]
    tied = kinds == 2  # two logits that agree to rounding, both large
    apart = wide[left[tied]] - wide[right[tied]]
    middle = wide[left[tied]] + wide[right[tied]]
    square = np.maximum((apart**2).sum(axis=1, keepdims=True), 1e-30)
    x[tied] = middle - (middle * apart).sum(axis=1, keepdims=True) / square * apart
    x[kinds == 3, rng.integers(H)] = 3000.0  # one huge activation
    x[kinds == 4] = np.rint(x[kinds == 4].clip(-9, 9))  # exact ties by small integers
    x[kinds == 5] *= 1e12
    x[kinds == 6] *= 1e-20
    x[kinds == 7] *= np.where(rng.random((int((kinds == 7).sum()), H)) < 0.5, 1e-40, 1)
    x[kinds == 8] = np.where(wide[left[kinds == 8]] < 0, -1, 1)  # every product of one sign
    x[kinds == 9] *= rng.random((int((kinds == 9).sum()), H)) < 0.1
    lost = kinds == 10  # just below half a step, so that rounding takes a whole row's sum away
    x[lost] = np.sign(wide[left[lost]]) * (0.49 / 127)
    x[lost, ::16] = 1.0
    x[lost] *= 10.0 ** rng.uniform(-2, 3, (int(lost.sum()), 1))
    x[:: max(count // 7, 1)] = 0
    return x.astype(np.float32)


def count_false(
    truth: Float64, found: Candidates, noise: Float32 | None = None, spare: Float64 | None = None
) -> int:
    """Rows in which something that was proved is wrong.

    Args:
        truth: Logits, [N, V].
        found: What the head gave.
        noise: What was handed to it, [N, V].
        spare: Rounding of `truth` itself, [N]; absent: the candidates' own error.
    """
    N, V = truth.shape
    order = np.argsort(-truth, axis=1, kind="stable")[:, : found.ids.shape[1]]
    ranks = np.arange(found.ids.shape[1])
    within = ranks < found.certified_k[:, None]
    wrong = ((order != found.ids) & within).any(axis=1)
    slack = 2 * found.error if spare is None else found.error + spare
    exact = np.take_along_axis(truth, found.ids, axis=1)
    wrong |= ~(np.abs(found.logits - exact) <= slack[:, None]).all(axis=1)
    outside = np.ones((N, V), np.bool_)
    np.put_along_axis(outside, found.ids, False, axis=1)
    keys = truth if noise is None else truth + noise
    limit = found.cut + slack + (0 if noise is None else np.abs(found.cut) * 2.0**-23)
    wrong |= (np.where(outside, keys, -np.inf) > limit[:, None]).any(axis=1)
    return int(wrong.sum())


@dataclass(frozen=True)
class Found:
    """What a hunt saw."""

    rows: int
    false: int
    first_proved: int  # rows whose best token was proved
    ranks_proved: int


def _batches(rows: int) -> Iterator[int]:
    for start in range(0, rows, _ROWS):
        yield min(_ROWS, rows - start)


def hunt(truth: Truth, bundle: Bundle, rows: int, seed: int, threads: int = 1) -> Found:
    """Run adversarial rows through one bundle; some batches with noise, some bound by bound."""
    runner: Runner = open_runner(bundle, SessionSettings(threads=threads))
    rng = np.random.default_rng(seed)
    seen, false, first, ranks = 0, 0, 0, 0
    for number, count in enumerate(_batches(rows)):
        states = adversarial_states(truth.weight, count, rng)
        noise = None
        if number % 4 == 3:
            noise = rng.gumbel(size=(count, len(truth.weight))).astype(np.float32)
        found = runner.head(states, "lm", noise).candidates
        assert found is not None
        logits = truth.logits(states)
        false += count_false(logits, found, noise)
        if number % 4 == 1:  # the bound itself, of every token
            upper = runner.quantised(states).upper_bounds
            false += int((logits > upper + 2 * found.error[:, None]).any(axis=1).sum())
        seen += count
        first += int((found.certified_k >= 1).sum())
        ranks += int(found.certified_k.sum())
    return Found(seen, false, first, ranks)
