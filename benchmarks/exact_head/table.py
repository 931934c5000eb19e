"""Block × rows × bound × M: what is proved, and what a step costs beside the plain heads."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from benchmarks.exact_head.bench import COUNTS, DEFAULT, VARIANTS, Bench, Variant, slices
from headport.bundle import Bundle
from headport.runner import Runner, open_runner
from headport.session import SessionSettings, open_session

__all__ = ["table"]

Float32 = npt.NDArray[np.float32]
Step = Callable[[Float32], object]

_COLD = 2  # steps at the start of a turn whose weights another head has pushed out of the caches
_TURN = 8
_ONE_THREAD = SessionSettings(threads=1)


def table(bench: Bench, blocks: tuple[int, ...], rounds: int) -> None:
    """Print one row per variant and M; heads of one block take turns in one process."""
    print(f"\n## Proved on {len(bench.states)} positions; step at batch 1, CPU time of 1 thread\n")
    print("| block | rows | bound | M | top-1 | top-10 | step ms | × plain INT8 | × float32 |")
    print("|---|---|---|---|---|---|---|---|---|")
    for block in blocks:
        variants = [v for v in VARIANTS if v.block == block]
        steps = {
            "plain": _topk_step(bench.plain(replace(DEFAULT, block=block, activations="rounded"))),
            "residual": _topk_step(bench.plain(replace(DEFAULT, block=block))),
            "float32": _topk_step(bench.head),
        }
        steps |= {
            _name(variant, count): _head_step(bench.certified(variant, count))
            for variant in variants
            for count in COUNTS
        }
        milliseconds = _in_turns(bench, steps, rounds)
        plain, whole = milliseconds["plain"], milliseconds["float32"]
        for name, label in (("plain", "one"), ("residual", "residual")):
            _row((block, label, "none", "TopK 64", "", ""), milliseconds[name], plain, whole)
        for variant in variants:
            rows = {"residual": "residual", "rounded": "one"}[variant.activations]
            for count, (first, ten) in _proved(bench, variant).items():
                cells = (block, rows, variant.bound, count, f"{first:.2%}", f"{ten:.2%}")
                _row(cells, milliseconds[_name(variant, count)], plain, whole)
        _row(("", "float32", "none", "TopK 64", "", ""), whole, plain, whole)
    print("\nproved: by the cut alone; a row for each M comes from one graph's upper bounds")


def _name(variant: Variant, count: int) -> str:
    return f"{variant.name} {count}"


def _row(cells: tuple[object, ...], step: float, plain: float, whole: float) -> None:
    each = [str(cell) for cell in cells]
    each += [f"{step:.2f}", f"{step / plain:.2f}", f"{step / whole:.2f}"]
    print("| " + " | ".join(each) + " |", flush=True)


def _proved(bench: Bench, variant: Variant) -> dict[int, tuple[float, float]]:
    """Share of positions whose best, and ten best, lie above the cut, for each M."""
    runner = open_runner(bench.certified(variant), bench.settings, ("lm",))
    found = dict.fromkeys(COUNTS, (0, 0))
    for rows in slices(len(bench.states)):
        upper = runner.quantised(bench.states[rows]).upper_bounds
        places = upper.shape[1] - 1 - np.array(COUNTS)
        cuts = np.partition(upper, places, axis=1)[:, places]
        exact = bench.leading[rows]
        for count, cut in zip(COUNTS, cuts.T, strict=True):
            first, ten = found[count]
            found[count] = (
                first + int((exact[:, 0] > cut).sum()),
                ten + int((exact[:, 9] > cut).sum()),
            )
    N = len(bench.states)
    return {count: (first / N, ten / N) for count, (first, ten) in found.items()}


def _in_turns(bench: Bench, steps: Mapping[str, Step], rounds: int) -> dict[str, float]:
    """Median milliseconds of CPU time of each head's step."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    order, names = np.random.default_rng(0), list(steps)
    for number in range(rounds):
        for index in order.permutation(len(names)):
            for place in range(_TURN):
                state = bench.states[(number * _TURN + place) % len(bench.states)][None]
                start = time.process_time()
                steps[names[index]](state)
                if place >= _COLD:
                    seconds[names[index]].append(time.process_time() - start)
    return {name: 1e3 * float(np.median(found)) for name, found in seconds.items()}


def _head_step(bundle: Bundle) -> Step:
    runner: Runner = open_runner(bundle, _ONE_THREAD, ("lm",))
    return runner.head


def _topk_step(bundle: Bundle, count: int = 64) -> Step:
    """The head with TopK in its graph, so that no vocabulary-wide array leaves it."""
    file = bundle.path / bundle.manifest.graphs["head.lm"].file
    model = ir.load(file)
    logits = model.graph.outputs[0]
    k = ir.val("k", const_value=ir.tensor(np.array([count]), name="k"))
    model.graph.register_initializer(k)
    node = ir.node("TopK", [logits, k], num_outputs=2, name="top")
    model.graph.append(node)
    model.graph.outputs.clear()
    for value, name, kind in zip(
        node.outputs, ("values", "ids"), (ir.DataType.FLOAT, ir.DataType.INT64), strict=True
    ):
        value.name, value.type, value.shape = name, ir.TensorType(kind), ir.Shape(["rows", count])
        model.graph.outputs.append(value)
    changed = bundle.path / "head.topk.onnx"
    ir.save(model, changed)
    session = open_session(changed, bundle.manifest.session_options, _ONE_THREAD)
    changed.unlink()
    return lambda states: session.run({"hidden_states": states})
