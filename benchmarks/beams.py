"""Beam search against transformers: ids equal, scores within 1e-4 or a millionth, on a tiny model.

`python -m benchmarks.beams [--prompts 100] [--tokens 8] [--part 1/3]` runs every prompt with beams
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

import torch
from transformers import AutoModelForCausalLM

from benchmarks.tiny import head_line, part_of, prompts_of, read_options
from headport.export.command import Options as ExportOptions
from headport.export.command import export
from headport.runtime import Generator
from tests.conftest import llama_config, save_model
from tests.runtime.beam_reference import beams_of_transformers

__all__ = ["main"]

_ENDS = [3, 50, 90, 120, 200]  # many, so that replies of several lengths compete
_BEAMS, _PENALTIES, _EARLY = (2, 4), (-1.0, 0.0, 1.0, 2.0), (False, True, "never")
_TOLERANCE = 1e-4
_RELATIVE = 1e-6  # scores of hundreds, at a penalty of -1, have no more digits in float32


def main() -> int:
    """Run all settings on all prompts."""
    options = read_options(__doc__, prompts=100, tokens=8)
    print(head_line(options))
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = save_model(Path(folder) / "model", llama_config(), options.seed)
        export(ExportOptions(model=str(checkpoint), output=Path(folder) / "bundle"))
        model = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
        with Generator(Path(folder) / "bundle", threads=1) as generator, torch.inference_mode():
            return _compare(generator, model, prompts_of(options, 8), options)


def _compare(
    generator: Generator, model: Any, prompts: list[list[int]], options: argparse.Namespace
) -> int:
    print(
        "| beams | length penalty | early stopping | replies | ids equal "
        "| largest \\|Δ score\\| | relative |"
    )
    print("|---|---|---|---|---|---|---|")
    wrong = 0
    tokens = options.tokens
    rows = itertools.product(_BEAMS, _PENALTIES, _EARLY)
    for beams, penalty, early in part_of(rows, options.part):
        settings = {"num_beams": beams, "length_penalty": penalty, "early_stopping": early}
        equal, replies, apart, share = 0, 0, 0.0, 0.0
        for prompt in prompts:
            found = generator.generate(
                [prompt], max_new_tokens=tokens, eos_token_id=_ENDS, n=beams, **settings
            )
            wanted, scores = beams_of_transformers(model, prompt, tokens, _ENDS, **settings)
            ids = [reply.token_ids for reply in found]
            same = sum(one == other for one, other in zip(ids, wanted, strict=True))
            equal, replies = equal + same, replies + beams
            gaps = [abs((f.score or 0.0) - s) for f, s in zip(found, scores, strict=True)]
            shares = [gap / abs(score) for gap, score in zip(gaps, scores, strict=True)]
            apart, share = max(apart, *gaps), max(share, *shares)
            if same != beams or (max(gaps) > _TOLERANCE and max(shares) > _RELATIVE):
                wrong += 1
                print(f"differs: {settings} {prompt}: {ids} instead of {wanted}", file=sys.stderr)
        row = (beams, f"{penalty:g}", early, replies, equal, f"{apart:.1e}", f"{share:.1e}")
        print(f"| {' | '.join(map(str, row))} |", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
