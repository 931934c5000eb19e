"""The exact INT8 head on SmolLM2 with an off-grid head: what it proves, says and costs.

`python -m benchmarks.exact_head --work FOLDER` prints
1. block × rows × bound × M: positions whose best token, and whose ten best, are proved;
2. mean KL and perplexity ratio of rescored logits against the original head, in float64;
3. time of one head step: plain INT8 + TopK, certified, float32 + TopK, in turns in one process.
`--hunt N` runs N adversarial rows and the texts' own positions through the shipped graphs and
counts false certificates. `--generate P` continues P prompts with `exact=True` and replays every
token on the float32 bundle. `--only` picks parts. Bundles are made once and kept in FOLDER.
"""

from __future__ import annotations

import argparse
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.hunt import CASES, count_false, hunt, make_heads
from benchmarks.material import texts, twin
from headport.bundle import Bundle
from headport.ledger import head_weight, read_tensor
from headport.runner import Runner, open_runner
from headport.session import SessionSettings, library_version

__all__ = ["main"]

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]

_WINDOW = 512
_COUNTS = (64, 128, 256)
_ROWS = 32


@dataclass(frozen=True)
class Variant:
    """One recipe of a certified head."""

    block: int
    activations: str
    bound: str

    @property
    def name(self) -> str:
        """Folder name."""
        return f"int8-{self.block}-{self.activations}-{self.bound}"


_VARIANTS = tuple(
    Variant(block, activations, bound)
    for block in (32, 64, 128)
    for activations in ("residual", "rounded")
    for bound in ("block", "row")
)
_DEFAULT = Variant(64, "residual", "row")


class Bench:
    """The model, its texts, and bundles made when first asked for."""

    def __init__(self, work: Path, positions: int, threads: int) -> None:
        self.work = work
        self.threads = threads
        self.source = self._export()
        self.settings = SessionSettings(threads=threads)
        self.states, self.targets = self._states(positions)
        entry, _ = head_weight(self.source.manifest, self.source.manifest.heads["lm"])
        self.weight: Float32 = np.asarray(read_tensor(self.source, entry))

    def _export(self) -> Bundle:
        folder = self.work / "fp32"
        if not folder.is_dir():
            from headport.export.command import Options, export

            export(Options(model=str(twin(self.work / "twin")), output=folder))
        return Bundle.open(folder, verify=False)

    def _states(self, positions: int) -> tuple[Float32, npt.NDArray[np.int64]]:
        """Hidden states of windows of the texts, and the token that follows each."""
        file = self.work / f"states-{positions}.npz"
        if not file.is_file():
            from headport.runtime.text import Tokens

            tokens = Tokens(self.source)
            runner = open_runner(self.source, self.settings)
            states, targets = [], []
            for text in texts(self.work / "texts", 2 * positions):
                ids = np.array(tokens.encode(text.read_text(encoding="utf-8")), np.int64)
                ids = ids[: positions // 3 + 2]
                for start in range(0, len(ids) - 1, _WINDOW):
                    part = ids[start : start + _WINDOW + 1]
                    cache = runner.new_cache(1, len(part))
                    length = np.array([len(part) - 1])
                    states.append(runner.forward(cache, part[None, :-1], length)[0])
                    targets.append(part[1:])
            np.savez(file, states=np.concatenate(states), targets=np.concatenate(targets))
        found = np.load(file)
        return found["states"], found["targets"]

    @cached_property
    def head(self) -> Bundle:
        """The head alone, tied, behind a lookup: variants of it are made in seconds."""
        from tests.toy_bundles import write_toy

        folder = self.work / "head"
        if not folder.is_dir():
            write_toy(folder, np.array(self.weight), tied=True)
        return Bundle.open(folder, verify=False)

    def certified(self, variant: Variant, count: int = _COUNTS[0]) -> Bundle:
        """A certified head, lowered."""
        return self._variant(f"{variant.name}-m{count}", variant, certify=True, rescore=count)

    def plain(self, activations: str) -> Bundle:
        """An INT8 head that gives all logits, lowered."""
        variant = replace(_DEFAULT, activations=activations)
        return self._variant(f"plain-{variant.name}", variant)

    def _variant(self, name: str, variant: Variant, **options: Any) -> Bundle:
        from headport.lowering import Options as LowerOptions
        from headport.lowering import lower

        folder = self.work / name
        if not folder.is_dir():
            with tempfile.TemporaryDirectory(dir=self.work) as scratch:
                made = _quantize(self.head, Path(scratch) / name, variant, **options)
                lower(LowerOptions(bundle=made.path, output=folder, target="ort-cpu"))
        return Bundle.open(folder, verify=False)

    def portable(self) -> Bundle:
        """The whole model with a certified head, portable."""
        folder = self.work / "certified"
        if not folder.is_dir():
            _quantize(self.source, folder, _DEFAULT, certify=True)
        return Bundle.open(folder, verify=False)

    def truth(self, rows: slice) -> Float64:
        """Logits of some positions in float64, [n, V]."""
        return self.states[rows].astype(np.float64) @ self._wide.T

    @cached_property
    def _wide(self) -> Float64:
        return self.weight.astype(np.float64)

    @cached_property
    def leading(self) -> Float32:
        """The eleven largest logits of every position, descending."""
        parts = []
        for rows in _slices(len(self.states)):
            logits = self.states[rows] @ self.weight.T
            parts.append(-np.sort(-np.partition(logits, -11, axis=1)[:, -11:], axis=1))
        found: Float32 = np.concatenate(parts)
        return found


def _quantize(source: Bundle, output: Path, variant: Variant, **options: Any) -> Bundle:
    from headport.quantize import Options, quantize

    asked: dict[str, Any] = {
        "block": variant.block,
        "activations": variant.activations,
        "bound": variant.bound,
        **options,
    }
    return quantize(Options(bundle=source.path, output=output, head="int8", **asked))


def _slices(count: int, step: int = _ROWS) -> Iterator[slice]:
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))


def proved(bench: Bench, blocks: tuple[int, ...]) -> None:
    """Table 1. Every M comes from one graph: its upper bounds give the cut of any other M."""
    print(f"\n## Proved, {len(bench.states)} positions\n")
    print("| block | rows | bound | " + " | ".join(f"M = {m}" for m in _COUNTS) + " |")
    print("|---|---|---|" + "---|" * len(_COUNTS))
    for variant in (v for v in _VARIANTS if v.block in blocks):
        runner = open_runner(bench.certified(variant), bench.settings, ("lm",))
        first, ten = np.zeros(len(_COUNTS)), np.zeros(len(_COUNTS))
        for rows in _slices(len(bench.states)):
            states = bench.states[rows]
            upper = runner.quantised(states).upper_bounds
            best = np.partition(upper, upper.shape[1] - 1 - np.array(_COUNTS), axis=1)
            exact = bench.leading[rows]
            for place, count in enumerate(_COUNTS):
                cut = best[:, upper.shape[1] - 1 - count]
                first[place] += (exact[:, 0] > cut).sum()
                ten[place] += (exact[:, 9] > cut).sum()
        shares = [
            f"{a / len(bench.states):.2%} / {b / len(bench.states):.2%}"
            for a, b in zip(first, ten, strict=True)
        ]
        kind = {"residual": "residual", "rounded": "one"}[variant.activations]
        print(f"| {variant.block} | {kind} | {variant.bound} | " + " | ".join(shares) + " |")
    print("\ntop-1 / top-10, by the cut alone; ranks that float64 cannot order are counted below")


def quality(bench: Bench) -> None:
    """Table 2: what the rescored head says, against float64."""
    runner = open_runner(bench.certified(_DEFAULT), bench.settings, ("lm",))
    kl, drift, top1, top10, ck1, ck10, lse_error = 0.0, 0.0, 0, 0, 0, 0, 0.0
    absolute, shift = 0.0, 0.0
    variance = _error_variance(bench)
    N = len(bench.states)
    for rows in _slices(N):
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
    print(f"\n## {_DEFAULT.name}, M 64, {N} positions, against float64\n")
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
    error = rows - dequantize_blocks(*quantize_blocks(rows, _DEFAULT.block), _DEFAULT.block)
    return float(np.square(error).sum(axis=1).mean() / rows.shape[1])


def _logsumexp(logits: Float64) -> Float64:
    largest = logits.max(axis=1, keepdims=True)
    total: Float64 = np.log(np.exp(logits - largest).sum(axis=1)) + largest[:, 0]
    return total


def step_time(bench: Bench, rounds: int) -> None:
    """Table 3. Heads take turns, one row at a time, one thread's CPU time."""
    certified = bench.certified(_DEFAULT)
    by_block = bench.certified(replace(_DEFAULT, bound="block"))
    steps = {
        "plain INT8, one row, + TopK 64": _topk_step(bench.plain("rounded"), 64),
        "plain INT8, residual rows, + TopK 64": _topk_step(bench.plain("residual"), 64),
        "certified, bound per row": _head_step(certified),
        "certified, bound per block": _head_step(by_block),
        "float32 + TopK 64": _topk_step(bench.head, 64),
    }
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    order = np.random.default_rng(0)
    names = list(steps)
    for number in range(rounds):
        for index in order.permutation(len(names)):
            for place in range(8):
                state = bench.states[(number * 8 + place) % len(bench.states)][None]
                start = time.process_time()
                steps[names[index]](state)
                if place >= 2:  # the first two find caches cold
                    seconds[names[index]].append(time.process_time() - start)
    base = float(np.median(seconds[names[0]]))
    print(f"\n## Head step, batch 1, 1 thread CPU time, {rounds * 6} steps each in turns\n")
    print("| head | median ms | first decile ms | × plain INT8 |\n|---|---|---|---|")
    for name, found in seconds.items():
        middle, low = np.median(found), np.quantile(found, 0.1)
        print(f"| {name} | {middle * 1e3:.2f} | {low * 1e3:.2f} | {middle / base:.2f} |")


def _head_step(bundle: Bundle) -> Callable[[Float32], object]:
    runner: Runner = open_runner(bundle, SessionSettings(threads=1), ("lm",))
    return runner.head


def _topk_step(bundle: Bundle, count: int) -> Callable[[Float32], object]:
    """The head with TopK in its graph, so that no vocabulary-wide array leaves it."""
    import onnx_ir as ir

    from headport.session import open_session

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
    session = open_session(changed, bundle.manifest.session_options, SessionSettings(threads=1))
    changed.unlink()
    return lambda states: session.run({"hidden_states": states})


def false_certificates(bench: Bench, rows: int) -> None:
    """Adversarial rows over all cases, then the texts' positions with the real head."""
    print("\n## False certificates\n")
    seen = false = 0
    each = -(-rows // (2 * len(CASES)))
    with tempfile.TemporaryDirectory(dir=bench.work) as scratch:
        for number, case in enumerate(CASES):
            truth, bundles = make_heads(case, Path(scratch) / str(number), seed=number)
            for place, bundle in enumerate(bundles):
                found = hunt(truth, bundle, each, 100 + 2 * number + place, bench.threads)
                seen, false = seen + found.rows, false + found.false
    print(f"adversarial: {false} false in {seen} rows, {len(CASES)} heads, portable and lowered")
    runner = open_runner(bench.certified(_DEFAULT), bench.settings, ("lm",))
    false = 0
    for part in _slices(len(bench.states)):
        found_part = runner.head(bench.states[part]).candidates
        assert found_part is not None
        false += count_false(bench.truth(part), found_part)
    real = f"{len(bench.states)} positions, {_DEFAULT.name}, V {len(bench.weight)}"
    print(f"real: {false} false in {real}")


_MODES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "T 0.8": {"temperature": 0.8, "top_k": 0, "top_p": 1.0},
    "T 1": {"temperature": 1.0, "top_k": 0, "top_p": 1.0},
    "T 1.5": {"temperature": 1.5, "top_k": 0, "top_p": 1.0},
    "min-p 0.05": {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.05},
    "top-k 50": {"temperature": 1.0, "top_k": 50, "top_p": 1.0},
    "top-p 0.9": {"temperature": 1.0, "top_k": 0, "top_p": 0.9},
}


def generation(bench: Bench, prompts: int, tokens: int) -> None:
    """`exact=True` against the float32 bundle, replayed token by token on its logits."""
    from headport.runtime import Generator
    from headport.runtime.noise import NoiseKey
    from headport.runtime.sampler import choose

    # The same backbone on both sides: portable, so that only the heads differ.
    exact = Generator(bench.portable(), threads=bench.threads, ignore=("repetition_penalty",))
    full = Generator(bench.source, threads=bench.threads, ignore=("repetition_penalty",))
    encoded = _prompts(bench, prompts)
    # The bound that validation calls a near tie: 2 √H u ‖h‖ max ‖W_v‖, at the texts' median ‖h‖.
    norms = np.linalg.norm(bench.weight, axis=1).max(), np.linalg.norm(bench.states, axis=1)
    bound = 2 * np.sqrt(bench.weight.shape[1]) * 2.0**-24 * norms[0] * float(np.median(norms[1]))
    print(f"\n## exact=True against float32, {prompts} prompts × {tokens} tokens\n")
    print("| mode | tokens | equal | float32 near ties | other | fallbacks |")
    print("|---|---|---|---|---|---|")
    for name, options in _MODES.items():
        before = exact.stats
        seeds = {} if name == "greedy" else {"seed": 11}
        replies = exact.generate(
            encoded, max_new_tokens=tokens, eos_token_id=(), **options, **seeds
        )
        equal, near, other = 0, [], 0
        for prompt, reply in zip(encoded, replies, strict=True):
            sampling = reply.parameters.sampling
            ids = prompt + reply.token_ids
            logits = full.logits(ids[:-1])[len(prompt) - 1 :]
            for step, token in enumerate(reply.token_ids):
                key = None if reply.seed is None else NoiseKey(reply.seed, step)
                wanted = choose(logits[step], np.arange(logits.shape[1]), sampling, key)
                if wanted == token:
                    equal += 1
                    continue
                apart = abs(float(logits[step, wanted] - logits[step, token]))
                if apart > bound:
                    other += 1
                near.append((step, wanted, token, apart))
        fell = exact.stats.fallbacks - before.fallbacks
        count = sum(len(reply.token_ids) for reply in replies)
        print(
            f"| {name} | {count} | {equal} | {len(near) - other} | {other} | "
            f"{fell} ({fell / count:.2%}) |"
        )
        for each in near:
            print(
                f"  step {each[0]}: float32 {each[1]}, exact {each[2]}, logits {each[3]:.2e} apart"
            )


def _prompts(bench: Bench, count: int) -> list[list[int]]:
    from headport.runtime.text import Tokens

    tokens = Tokens(bench.source)
    ids: list[int] = []
    for text in texts(bench.work / "texts", 60000):
        ids += tokens.encode(text.read_text(encoding="utf-8"))
    step = max(1, (len(ids) - 32) // count)
    return [ids[n * step : n * step + 8 + n % 24] for n in range(count)]


_PARTS = ("proved", "quality", "time")


def main(arguments: list[str] | None = None) -> int:
    """Print what was asked for."""
    parser = argparse.ArgumentParser(prog="benchmarks.exact_head", description=__doc__)
    parser.add_argument("--work", type=Path, default=Path("out/exact_head"))
    parser.add_argument("--positions", type=int, default=3000, help="positions of text")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=60, help="turns of the timing")
    parser.add_argument("--only", nargs="*", choices=_PARTS, default=_PARTS)
    parser.add_argument("--blocks", type=int, nargs="+", default=[32, 64, 128], help="of table 1")
    parser.add_argument("--hunt", type=int, default=0, metavar="N", help="adversarial rows")
    parser.add_argument("--generate", type=int, default=0, metavar="P", help="prompts")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens of each prompt")
    found = parser.parse_args(arguments)
    found.work.mkdir(parents=True, exist_ok=True)
    bench = Bench(found.work, found.positions, found.threads)
    print(
        f"{platform.machine()}, Python {platform.python_version()}, ONNX Runtime "
        f"{library_version()}, {time.strftime('%Y-%m-%d')}; SmolLM2-135M, noise on its head"
    )
    if "proved" in found.only:
        proved(bench, tuple(found.blocks))
    if "quality" in found.only:
        quality(bench)
    if "time" in found.only:
        step_time(bench, found.rounds)
    if found.hunt:
        false_certificates(bench, found.hunt)
    if found.generate:
        generation(bench, found.generate, found.tokens)
    return 0


if __name__ == "__main__":
    sys.exit(main())
