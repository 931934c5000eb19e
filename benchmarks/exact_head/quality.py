"""What a rescored head says, against float64: agreement, KL, log-sum-exp."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from benchmarks.exact_head.bench import DEFAULT, Bench, slices
from headport.runner import open_runner

__all__ = ["quality"]

Float64 = npt.NDArray[np.float64]


def quality(bench: Bench) -> None:
    """Table 2: what the rescored head says, against float64."""
    runner = open_runner(bench.certified(DEFAULT), bench.settings, ("lm",))
    kl, drift, top1, top10, ck1, ck10, lse_error = 0.0, 0.0, 0, 0, 0, 0, 0.0
    absolute, shift = 0.0, 0.0
    variance = _error_variance(bench)
    N = len(bench.states)
    for rows in slices(N):
        truth = bench.truth(rows)
        found = runner.head(bench.states[rows]).candidates
        assert found is not None
        said = runner.quantised(bench.states[rows]).logits.astype(np.float64)
        np.put_along_axis(said, found.ids, found.logits, axis=1)
        log_p = truth - _logsumexp(truth)[:, None]
        log_q = said - found.logsumexp[:, None]
        p = np.exp(log_p)
        kl += float((p * (log_p - log_q)).sum())
        lse_error += float((found.logsumexp - _logsumexp(truth)).sum())
        absolute += float(np.abs(found.logsumexp - _logsumexp(truth)).sum())
        total = np.exp(found.logsumexp - found.logits[:, 0])
        best = np.exp(found.logits - found.logits[:, :1]).sum(axis=1)
        factor = np.exp(-np.square(bench.states[rows]).sum(axis=1) * variance / 2)
        shift += float(np.log((best + (total - best) * factor) / total).sum())
        targets = bench.targets[rows][:, None]
        drift += float((np.take_along_axis(log_p - log_q, targets, axis=1)).sum())
        order = np.argsort(-truth, axis=1, kind="stable")[:, :10]
        top1 += int((order[:, 0] == found.ids[:, 0]).sum())
        top10 += int((order == found.ids[:, :10]).all(axis=1).sum())
        ck1 += int((found.certified_k >= 1).sum())
        ck10 += int((found.certified_k >= 10).sum())
    print(f"\n## {DEFAULT.name}, M 64, {N} positions, against float64\n")
    print(f"top-1 right {top1 / N:.3%}, top-10 right and in order {top10 / N:.3%}")
    print(f"certified_k ≥ 1 {ck1 / N:.3%}, ≥ 10 {ck10 / N:.3%}")
    print(f"mean KL {kl / N:.2e}, perplexity × {np.exp(drift / N):.6f}")
    print(f"log-sum-exp: mean error {lse_error / N:+.2e}, mean |error| {absolute / N:.2e}")
    print(
        f"with the tail's noise correction: mean KL {(kl + shift) / N:.2e}, log-sum-exp mean "
        f"error {(lse_error + shift) / N:+.2e}"
    )


def _error_variance(bench: Bench) -> float:
    """Mean ‖E_v‖² / H: variance of a quantised logit per unit of ‖x‖²."""
    from headport.quantize.blocks import dequantize_blocks, quantize_blocks

    rows = np.array(bench.weight[:: max(1, len(bench.weight) // 4096)])
    error = rows - dequantize_blocks(*quantize_blocks(rows, DEFAULT.block), DEFAULT.block)
    return float(np.square(error).sum(axis=1).mean() / rows.shape[1])


def _logsumexp(logits: Float64) -> Float64:
    largest = logits.max(axis=1, keepdims=True)
    total: Float64 = np.log(np.exp(logits - largest).sum(axis=1)) + largest[:, 0]
    return total
