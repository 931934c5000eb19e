"""Prompts that begin alike, on real graphs: the reply is the one without reuse, to the last bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headport.runtime import Generator
from headport.runtime.results import Generation

SYSTEM = [(7 * n) % 250 + 1 for n in range(20)]
PROMPTS = [SYSTEM + tail for tail in ([3, 4], [5], [3, 4, 9, 9], [8] * 9)]
# Likelihoods are floats of the logits, so that equal ones mean equal caches.
ASK: dict[str, Any] = {"max_new_tokens": 5, "logprobs": 3, "eos_token_id": ()}


@pytest.fixture(params=["tiny_bundle", "tiny_lowered"], scope="module")
def bundle(request: pytest.FixtureRequest) -> Path:
    path: Path = request.getfixturevalue(request.param)
    return path


def ask(generator: Generator, prompt: list[int], **options: Any) -> Generation:
    [reply] = generator.generate([prompt], **ASK, **options)
    return reply


def test_a_prefix_that_is_taken_over_changes_no_bit(bundle: Path) -> None:
    with (
        Generator(bundle, threads=1, prefill_chunk=8, prefix_reuse=False) as cold,
        Generator(bundle, threads=1, prefill_chunk=8) as warm,
    ):
        for prompt in (*PROMPTS, *PROMPTS):
            for more in ({}, {"temperature": 1.0, "seed": 3}):
                assert ask(warm, prompt, **more) == ask(cold, prompt, **more)
        assert cold.stats.reused_tokens == 0
        # Every prompt but the first finds the two chunks of the beginning, or more.
        assert warm.stats.reused_tokens >= 16 * 15
        assert warm.stats.prompt_tokens + warm.stats.reused_tokens == cold.stats.prompt_tokens


def test_what_a_prompt_gives_depends_on_nothing_that_runs_with_it(bundle: Path) -> None:
    with Generator(bundle, threads=1, prefill_chunk=8, slots=4) as generator:
        alone = [ask(generator, prompt) for prompt in PROMPTS]
        together = generator.generate(PROMPTS, **ASK)
    for one, other in zip(alone, together, strict=True):
        assert one.logprobs[0] == other.logprobs[0]
        assert one.token_ids == other.token_ids


def test_samples_of_a_prompt_share_it(bundle: Path) -> None:
    with Generator(bundle, threads=1, prefill_chunk=8) as generator:
        options = {"temperature": 1.0, "seed": 5, "max_new_tokens": 4, "logprobs": 0}
        four = generator.generate([PROMPTS[3]], n=4, **options)
        assert generator.stats.prompt_tokens == len(PROMPTS[3]) + 3 * (len(PROMPTS[3]) - 24)
        assert len({tuple(reply.token_ids) for reply in four}) == 4
        again = generator.generate([PROMPTS[3]], n=2, **options)
        assert [r.token_ids for r in again] == [r.token_ids for r in four[:2]]
