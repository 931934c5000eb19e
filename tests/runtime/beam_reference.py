"""What `transformers.generate` gives for a beam search; used by tests and by `benchmarks.beams`."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

__all__ = ["FIELDS", "beams_of_transformers", "until_end"]

# Options of headport that transformers calls otherwise.
FIELDS = {
    "bad_words": "bad_words_ids",
    "forced_bos": "forced_bos_token_id",
    "forced_eos": "forced_eos_token_id",
    "logit_bias": "sequence_bias",
}


def until_end(tokens: list[int], ends: Collection[int]) -> list[int]:
    """Tokens up to the first end token, which is included; padding behind it goes."""
    end = next((n for n, token in enumerate(tokens) if token in ends), len(tokens) - 1)
    return tokens[: end + 1]


def beams_of_transformers(
    model: Any, prompt: list[int], limit: int, ends: list[int], **options: Any
) -> tuple[list[list[int]], list[float]]:
    """New tokens and score of every beam, best first.

    Args:
        model: A model of transformers.
        prompt: Token ids.
        limit: Most new tokens.
        ends: End tokens.
        **options: As headport names them, `num_beams` among them.
    """
    import torch

    found = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=limit,
        do_sample=False,
        eos_token_id=ends,
        pad_token_id=0,
        num_return_sequences=options["num_beams"],
        output_scores=True,
        return_dict_in_generate=True,
        **{FIELDS.get(name, name): value for name, value in options.items()},
    )
    rows = found.sequences[:, len(prompt) :].tolist()
    return [until_end(row, ends) for row in rows], found.sequences_scores.tolist()
