"""Forced first and last tokens, as transformers forces them."""

from __future__ import annotations

import numpy as np
import pytest

from headport.runtime.sampling.forced import force_ids, forced_ids
from headport.runtime.sampling.sampler import choose
from headport.runtime.sampling.settings import Context, Sampling

IDS = np.array([2, 5, 7, 9])
SCORES = np.array([1.0, 4.0, 2.0, 3.0])
BOTH = Sampling(forced_bos=9, forced_eos=(2,))


def at(step: int, prompt: int = 1, limit: int = 4) -> Context:
    return Context((0,) * prompt, (5,) * step, (), max_new_tokens=limit)


@pytest.mark.parametrize(
    ("context", "forced"),
    [
        (at(0), (9,)),
        (at(0, prompt=2), ()),  # the prompt goes on where the start has been
        (at(1), ()),
        (at(3), (2,)),
        (at(0, limit=1), (2,)),  # the end wins
    ],
)
def test_what_is_forced_when(context, forced):
    assert forced_ids(BOTH, context) == forced


def test_all_else_is_banned_and_what_is_forced_scores_nothing():
    assert force_ids(SCORES, IDS, BOTH, at(0)).tolist() == [-np.inf, -np.inf, -np.inf, 0.0]
    assert force_ids(SCORES, IDS, BOTH, at(1)) is SCORES


def test_it_is_what_transformers_does():
    import torch
    from transformers import ForcedBOSTokenLogitsProcessor, ForcedEOSTokenLogitsProcessor

    scores = torch.tensor(SCORES)[None]
    sampling = Sampling(forced_bos=1, forced_eos=(2, 3))
    processors = [ForcedBOSTokenLogitsProcessor(1), ForcedEOSTokenLogitsProcessor(5, [2, 3])]
    for step in range(4):
        past, found = torch.zeros(1, 1 + step, dtype=torch.long), scores
        for processor in processors:
            found = processor(past, found)
        ours = force_ids(SCORES, np.arange(4), sampling, at(step))
        assert ours.tolist() == found[0].tolist()


def test_bans_before_it_do_not_hold():
    banned = Sampling(forced_eos=(2,), min_new_tokens=4)
    context = Context((0,), (5, 5, 5), (2,), max_new_tokens=4)
    assert choose(SCORES.astype(np.float32), IDS, banned, None, context) == 2
