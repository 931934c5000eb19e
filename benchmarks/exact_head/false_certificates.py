"""False certificates: adversarial rows over all cases, then real positions with the real head."""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.exact_head.bench import DEFAULT, ONE_ROW, Bench, slices
from benchmarks.hunt import CASES, count_false, hunt, make_heads
from headport.runner import open_runner

__all__ = ["false_certificates"]


def false_certificates(bench: Bench, rows: int) -> bool:
    """Adversarial rows over all cases, then the texts' positions with the real head.

    Returns:
        Whether no certificate was false.
    """
    print("\n## False certificates\n")
    seen = false = 0
    forms = "portable and lowered" if bench.kernels is None else "portable, lowered, own kernels"
    each = -(-rows // ((2 + (bench.kernels is not None)) * len(CASES)))
    with tempfile.TemporaryDirectory(dir=bench.work) as scratch:
        for number, case in enumerate(CASES):
            truth, bundles = make_heads(
                case, Path(scratch) / str(number), seed=number, kernels=bench.kernels
            )
            for place, bundle in enumerate(bundles):
                found = hunt(truth, bundle, each, 100 + 3 * number + place, bench.threads)
                seen, false = seen + found.rows, false + found.false
    print(f"adversarial: {false} false in {seen} rows, {len(CASES)} heads, {forms}")
    for variant in (DEFAULT, ONE_ROW):
        runner = open_runner(bench.certified(variant), bench.settings, ("lm",))
        wrong = 0
        for part in slices(len(bench.states)):
            candidates = runner.head(bench.states[part]).candidates
            assert candidates is not None
            wrong += count_false(bench.truth(part), candidates)
        real = f"{len(bench.states)} positions, {variant.name}, V {len(bench.weight)}"
        print(f"real: {wrong} false in {real}")
        false += wrong
    return not false
