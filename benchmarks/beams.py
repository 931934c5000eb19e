"""Beam search against transformers: ids equal, scores within 1e-4, on a tiny random model.

`python -m benchmarks.beams [--prompts 100] [--tokens 8] [--seed 0]` runs every prompt with beams
2 and 4, length penalty -1, 0, 1 and 2, and all three modes of early stopping, through the exported
bundle and through `transformers.generate`. Times are not measured. A prompt whose replies differ is
listed with both; the exit code is 1 if there is one.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from headport.export.command import Options as ExportOptions
from headport.export.command import export
from headport.runtime import Generator
from tests.conftest import VOCAB_SIZE, llama_config, save_model

__all__ = ["main"]

_ENDS = [3, 50, 90, 120, 200]  # many, so that replies of several lengths compete
_BEAMS, _PENALTIES, _EARLY = (2, 4), (-1.0, 0.0, 1.0, 2.0), (False, True, "never")
_TOLERANCE = 1e-4


def _reference(
    model: Any, prompt: list[int], tokens: int, settings: dict[str, Any]
) -> tuple[list[list[int]], list[float]]:
    found = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=tokens,
        do_sample=False,
        eos_token_id=_ENDS,
        pad_token_id=0,
        num_return_sequences=settings["num_beams"],
        output_scores=True,
        return_dict_in_generate=True,
        **settings,
    )
    replies = []
    for row in found.sequences[:, len(prompt) :].tolist():
        end = next((n for n, token in enumerate(row) if token in _ENDS), len(row) - 1)
        replies.append(row[: end + 1])
    return replies, found.sequences_scores.tolist()


def main() -> int:
    """Run all settings on all prompts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Plain)
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rng = np.random.default_rng(options.seed)
    prompts = [
        rng.integers(1, VOCAB_SIZE, rng.integers(1, 9)).tolist() for _ in range(options.prompts)
    ]
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = save_model(Path(folder) / "model", llama_config(), options.seed)
        export(ExportOptions(model=str(checkpoint), output=Path(folder) / "bundle"))
        model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint).eval()
        with Generator(Path(folder) / "bundle", threads=1) as generator, torch.inference_mode():
            return _compare(generator, model, prompts, options.tokens)


def _compare(generator: Generator, model: Any, prompts: list[list[int]], tokens: int) -> int:
    versions = f"transformers {transformers.__version__}, torch {torch.__version__}"
    print(f"{len(prompts)} prompts, {tokens} new tokens, {versions}\n")
    print(
        "| beams | length penalty | early stopping | replies | ids equal | largest \\|Δ score\\| |"
    )
    print("|---|---|---|---|---|---|")
    wrong = 0
    for beams, penalty, early in itertools.product(_BEAMS, _PENALTIES, _EARLY):
        settings = {"num_beams": beams, "length_penalty": penalty, "early_stopping": early}
        equal, replies, apart = 0, 0, 0.0
        for prompt in prompts:
            found = generator.generate(
                [prompt], max_new_tokens=tokens, eos_token_id=_ENDS, n=beams, **settings
            )
            wanted, scores = _reference(model, prompt, tokens, settings)
            ids = [reply.token_ids for reply in found]
            same = sum(one == other for one, other in zip(ids, wanted, strict=True))
            equal, replies = equal + same, replies + beams
            gaps = [abs((f.score or 0.0) - s) for f, s in zip(found, scores, strict=True)]
            apart = max(apart, *gaps)
            if same != beams or max(gaps) > _TOLERANCE:
                wrong += 1
                print(f"differs: {settings} {prompt}: {ids} instead of {wanted}", file=sys.stderr)
        print(f"| {beams} | {penalty:g} | {early} | {replies} | {equal} | {apart:.1e} |")
    return 1 if wrong else 0


class _Plain(argparse.RawDescriptionHelpFormatter):
    """Keeps the lines of the description."""


if __name__ == "__main__":
    sys.exit(main())
