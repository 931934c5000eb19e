"""`exact=True` against the float32 bundle, token by token, in every mode of sampling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.exact_head.bench import Bench
from benchmarks.material import texts
from headport.runtime import Generator
from headport.runtime.sampling.noise import NoiseKey, draw_bits, gumbel
from headport.runtime.sampling.sampler import choose
from headport.runtime.text import Tokens

__all__ = ["MODES", "generation"]

MODES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "T 0.8": {"temperature": 0.8, "top_k": 0, "top_p": 1.0},
    "T 1": {"temperature": 1.0, "top_k": 0, "top_p": 1.0},
    "T 1.5": {"temperature": 1.5, "top_k": 0, "top_p": 1.0},
    "min-p 0.05": {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.05},
    "top-k 50": {"temperature": 1.0, "top_k": 50, "top_p": 1.0},
    "top-p 0.9": {"temperature": 1.0, "top_k": 0, "top_p": 0.9},
}


def generation(
    bench: Bench, prompts: int, tokens: int, target: str, modes: tuple[str, ...]
) -> bool:
    """`exact=True` against the float32 head on the same backbone, replayed on its logits.

    Returns:
        Whether every token is the float32 head's, but for its own near ties.
    """
    options: dict[str, Any] = {"threads": bench.threads, "ignore": ("repetition_penalty",)}
    exact = Generator(bench.whole(target, certified=True), exact=True, **options)
    full = Generator(bench.whole(target, certified=False), **options)
    encoded = _prompts(bench, prompts)
    print(f"\n## exact=True against float32, {target}, {prompts} prompts × {tokens} tokens\n")
    print("| mode | tokens | equal | float32 near ties | other | fallbacks |")
    print("|---|---|---|---|---|---|")
    others = 0
    for name in modes:
        mode, before = MODES[name], exact.stats
        seeds = {} if name == "greedy" else {"seed": 11}
        replies = exact.generate(encoded, max_new_tokens=tokens, eos_token_id=(), **mode, **seeds)
        differences: list[_Difference] = []
        for prompt, reply in zip(encoded, replies, strict=True):
            differences += _differences(full, prompt, reply)
        fell = exact.stats.fallbacks - before.fallbacks
        count = sum(len(reply.token_ids) for reply in replies)
        bound = _near_tie(bench)
        other = sum(each.apart > bound for each in differences)
        others += other
        near = len(differences) - other
        print(
            f"| {name} | {count} | {count - near - other} | {near} | {other} | "
            f"{fell} ({fell / count:.2%}) |",
            flush=True,
        )
        for each in differences:
            print(f"  {each}")
    return not others


@dataclass(frozen=True)
class _Difference:
    """One token that the float32 head would have chosen otherwise."""

    step: int
    wanted: int
    found: int
    apart: float  # of logit + T · noise, between the two tokens

    def __str__(self) -> str:
        return (
            f"step {self.step}: float32 {self.wanted}, exact {self.found}, {self.apart:.2e} apart"
        )


def _differences(full: Generator, prompt: list[int], reply: Any) -> list[_Difference]:
    sampling = reply.parameters.sampling
    ids = prompt + reply.token_ids
    logits = full.logits(ids[:-1])[len(prompt) - 1 :]
    found = []
    for step, token in enumerate(reply.token_ids):
        key = None if reply.seed is None else NoiseKey(reply.seed, step)
        row = logits[step]
        wanted = choose(row, np.arange(len(row)), sampling, key)
        if wanted == token:
            continue
        scores = row.astype(np.float64)
        if key is not None:
            scores += sampling.temperature * gumbel(draw_bits(key, len(row)))
        found.append(_Difference(step, wanted, token, abs(float(scores[wanted] - scores[token]))))
    return found


def _near_tie(bench: Bench) -> float:
    # What validation calls a near tie: 2 √H u ‖h‖ max ‖W_v‖, at the texts' median ‖h‖.
    size = float(np.linalg.norm(bench.weight, axis=1).max())
    norm = float(np.median(np.linalg.norm(bench.states, axis=1)))
    return 2 * float(np.sqrt(bench.weight.shape[1])) * 2.0**-24 * size * norm


def _prompts(bench: Bench, count: int) -> list[list[int]]:
    tokens = Tokens(bench.source)
    ids: list[int] = []
    for text in texts(bench.work / "texts", 60000):
        ids += tokens.encode(text.read_text(encoding="utf-8"))
    step = max(1, (len(ids) - 32) // count)
    return [ids[n * step : n * step + 8 + n % 24] for n in range(count)]
