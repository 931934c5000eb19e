"""The runtime's sampler against PyTorch's on the same logits: the same token at every step.

`python -m benchmarks.sampler [--prompts 200] [--tokens 64] [--part 1/2]` continues all prompts with
each of twelve sets of parameters on a tiny random model, all of them in one batch. At every step
the row of logits that the runtime chose from also goes to the reference sampler of `validate`:
transformers' own processors and warpers in float64, and noise computed from the paper. Times are
not measured. The exit code is 1 if one token differs.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.tiny import head_line, part_of, prompts_of, read_options
from headport.bundle import Bundle
from headport.export.command import Options as ExportOptions
from headport.export.command import export
from headport.runner import Runner, open_runner
from headport.runtime.generation_config import Defaults
from headport.runtime.parameters import Options, resolve
from headport.runtime.row import Row
from headport.runtime.sampling.choice import Choice
from headport.runtime.sampling.chooser import LogitsChooser
from headport.runtime.text import TextStream, Tokens
from headport.runtime.vocabulary import IdMap
from headport.session import SessionSettings
from headport.validate.reference_sampler import gumbel_noise, process
from headport.validate.wire import SamplingCase
from tests.conftest import llama_config, save_model

__all__ = ["SETS", "main"]

Float32 = npt.NDArray[np.float32]

SETS: tuple[dict[str, Any], ...] = (
    {},
    {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3},
    {"temperature": 0.7},
    {"temperature": 1.0, "top_k": 20},
    {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.1},
    {"temperature": 1.2, "min_p": 0.05, "presence_penalty": 0.6, "frequency_penalty": 0.3},
    {"temperature": 1.0, "typical_p": 0.8, "min_new_tokens": 8, "eos_token_id": [0, 200]},
    {"temperature": 1.1, "epsilon_cutoff": 0.002, "bad_words": [[7], [8, 9], [65, 66]]},
    {"temperature": 1.0, "eta_cutoff": 0.003, "logit_bias": {5: 2.0, (101, 102): -5.0}},
    {"temperature": 1.5, "top_k": 60, "top_p": 0.95, "min_p": 0.01, "typical_p": 0.95},
    {"temperature": 1.0, "allowed": list(range(0, 257, 3)), "frequency_penalty": -0.2},
    {"temperature": 0.9, "suppress_tokens": [1, 2, 3, 0], "begin_suppress_tokens": [60, 61]},
)


def _case(row: Row) -> SamplingCase:
    """What the reference is asked for: the row's parameters and past."""
    known = set(SamplingCase.__struct_fields__)
    own = {name: value for name, value in vars(row.sampling).items() if name in known}
    allowed = getattr(row.sampling.allowed, "token_ids", ())
    return SamplingCase(
        **(own | {"allowed": allowed}),
        prompt=tuple(row.prompt_token_ids),
        reply=tuple(row.token_ids),
        eos_token_ids=row.parameters.eos_token_ids,
    )


def _rows(
    bundle: Bundle, prompts: list[list[int]], options: dict[str, Any], tokens: int
) -> list[Row]:
    given: Options = {"max_new_tokens": tokens, "seed": list(range(1, len(prompts) + 1)), **options}  # type: ignore[typeddict-item]
    request = resolve(given, Defaults(), len(prompts))
    text, seeds = Tokens(bundle), request.seeds or ()
    sampled = request.sampling.temperature > 0
    return [
        Row(
            n,
            prompt,
            request.parameters(tokens),
            seeds[n] if sampled else None,
            TextStream(text),
            False,
        )
        for n, prompt in enumerate(prompts)
    ]


_noise = lru_cache(maxsize=None)(gumbel_noise)  # sets of parameters share their keys


def _check(logits: Float32, rows: Sequence[Row], choices: Sequence[Any]) -> int:
    """How many of the choices are the reference's; rows with pasts of one shape go together."""
    groups: dict[int, list[int]] = {}
    for n, row in enumerate(rows):
        groups.setdefault(len(row.prompt_token_ids), []).append(n)
    equal = 0
    for among in groups.values():
        past = [[*rows[n].prompt_token_ids, *rows[n].token_ids] for n in among]
        case = _case(rows[among[0]])
        scores = process(torch.from_numpy(logits[among]), torch.tensor(past), case).numpy()
        for n, row_scores in zip(among, scores, strict=True):
            row = rows[n]
            noise = _noise(len(row_scores), row.step, row.sample, row.seed) if row.seed else 0.0
            equal += int(np.argmax(row_scores + noise)) == choices[n].token_id
    return equal


def _run(runner: Runner, chooser: LogitsChooser, rows: list[Row], tokens: int) -> tuple[int, int]:
    """All rows to their end in one batch; draws, and how many equal the reference's."""
    lengths = np.array([len(row.prompt_token_ids) for row in rows])
    ids = np.zeros((len(rows), int(lengths.max())), np.int64)
    for n, row in enumerate(rows):
        ids[n, : lengths[n]] = row.prompt_token_ids
    cache = runner.new_cache(len(rows), int(lengths.max()) + tokens)
    draws = equal = 0
    while lengths.any():
        hidden = runner.forward(cache, ids, lengths)
        alive = np.flatnonzero(lengths).tolist()
        last, some = hidden[alive, lengths[alive] - 1], [rows[n] for n in alive]
        choices = chooser.choose(last, some)
        draws, equal = draws + len(alive), equal + _check(chooser.logits(last), some, choices)
        for row, choice in zip(some, choices, strict=True):
            assert isinstance(choice, Choice)
            row.accept(choice)
        lengths = np.array([int(row.finish_reason is None) for row in rows])
        ids = np.array([[row.token_ids[-1]] for row in rows])
    return draws, equal


def main() -> int:
    """Run all sets on all prompts."""
    options = read_options(__doc__, prompts=200, tokens=64)
    prompts = prompts_of(options, 11)
    print(head_line(options))
    print("| parameters | draws | equal |")
    print("|---|---|---|")
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        config = llama_config(max_position_embeddings=12 + options.tokens)
        checkpoint = save_model(Path(folder) / "model", config, options.seed)
        bundle = export(ExportOptions(model=str(checkpoint), output=Path(folder) / "bundle"))
        runner = open_runner(bundle, replace(SessionSettings(), threads=1))
        chooser = LogitsChooser(runner, "lm", IdMap.from_bundle(bundle))
        for each in part_of(SETS, options.part):
            rows = _rows(bundle, prompts, each, options.tokens)
            draws, equal = _run(runner, chooser, rows, options.tokens)
            wrong += draws - equal
            said = ", ".join(f"{name} {_short(value)}" for name, value in each.items()) or "greedy"
            print(f"| {said} | {draws} | {equal} |", flush=True)
    return 1 if wrong else 0


def _short(value: Any) -> str:
    return f"of {len(value)}" if isinstance(value, list | dict) else f"{value:g}"


if __name__ == "__main__":
    sys.exit(main())
