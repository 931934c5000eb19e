"""The reference's sampler: transformers' own rules, and noise computed here from the paper.

It runs in the reference process and shares no line with `headport.runtime`: the same rule written
a second time, by `runtime/SAMPLING.md` and the papers alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from headport.validate.wire import SamplingCase

__all__ = ["distribution", "draw", "gumbel_noise", "philox_blocks", "process"]

UInt64 = npt.NDArray[np.uint64]
Float64 = npt.NDArray[np.float64]

_MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
_WEYL = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
_ROUNDS = 10
_MASK = 2**64 - 1
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def _product(a: UInt64, factor: int) -> tuple[UInt64, UInt64]:
    """High and low words of a · factor, by halves of 32 bits."""
    f_low, f_high = np.uint64(factor & 0xFFFFFFFF), np.uint64(factor >> 32)
    a_low, a_high = a & _LOW, a >> _HALF
    low = a_low * f_low
    middle = a_high * f_low + (low >> _HALF)
    carry = a_low * f_high + (middle & _LOW)
    high = a_high * f_high + (middle >> _HALF) + (carry >> _HALF)
    return high, (carry << _HALF) | (low & _LOW)


def philox_blocks(counters: UInt64, step: int, sample: int, seed: int) -> UInt64:
    """Philox4x64-10 blocks of the counters (counters[i], step, sample, 0), key (seed, 0).

    Returns:
        [n, 4] words.

    Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", section 4.3.
    """
    c0 = counters.copy()
    c1, c2, c3 = (np.full_like(c0, word) for word in (step, sample, 0))
    keys = [seed, 0]
    for _ in range(_ROUNDS):
        high0, low0 = _product(c0, _MULTIPLIERS[0])
        high1, low1 = _product(c2, _MULTIPLIERS[1])
        k0, k1 = np.uint64(keys[0]), np.uint64(keys[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        keys = [(key + weyl) & _MASK for key, weyl in zip(keys, _WEYL, strict=True)]
    return np.stack([c0, c1, c2, c3], axis=1)


def gumbel_noise(vocab_size: int, step: int, sample: int, seed: int) -> Float64:
    """Noise of the ids 0 … vocab_size − 1; bits and ids as SAMPLING.md pairs them."""
    ids = np.arange(vocab_size)
    words = philox_blocks(np.arange((vocab_size + 7) // 8, dtype=np.uint64), step, sample, seed)
    word = words[ids // 8, (ids % 8) // 2]
    bits = np.where(ids % 2 == 1, word >> _HALF, word & _LOW).astype(np.float64)
    noise: Float64 = -np.log(-np.log((2 * bits + 1) / 2.0**33))
    return noise


def _penalised(past: torch.Tensor, scores: torch.Tensor, case: SamplingCase) -> torch.Tensor:
    """μ[j] - c[j] · frequency - (c[j] > 0) · presence, c counted over the reply.

    Source: the OpenAI API reference, "Frequency and presence penalties".
    """
    reply = past[:, len(case.prompt) :]
    counts = torch.zeros_like(scores).scatter_add_(
        1, reply, torch.ones_like(reply, dtype=scores.dtype)
    )
    return scores - counts * case.frequency_penalty - (counts > 0) * case.presence_penalty


def _rules(case: SamplingCase) -> list[Any]:
    """Transformers' processors in the order of its `_get_logits_processor`; penalties inserted."""
    import transformers as tf

    ends = list(case.eos_token_ids)
    words = [list(word) for word in case.bad_words]
    bias = [[list(word), value] for word, value in case.logit_bias]
    new, suppress, begin = case.min_new_tokens, case.suppress_tokens, case.begin_suppress_tokens
    start = len(case.prompt)
    table: tuple[tuple[Any, Callable[[], Any]], ...] = (
        (bias, lambda: tf.SequenceBiasLogitsProcessor(bias)),
        (
            case.repetition_penalty != 1,
            lambda: tf.RepetitionPenaltyLogitsProcessor(case.repetition_penalty),
        ),
        (
            case.presence_penalty or case.frequency_penalty,
            lambda: lambda past, scores: _penalised(past, scores, case),
        ),
        (
            case.no_repeat_ngram_size,
            lambda: tf.NoRepeatNGramLogitsProcessor(case.no_repeat_ngram_size),
        ),
        (words, lambda: tf.NoBadWordsLogitsProcessor(words, ends)),
        (new and ends, lambda: tf.MinNewTokensLengthLogitsProcessor(start, new, ends)),
        (case.allowed, lambda: tf.PrefixConstrainedLogitsProcessor(lambda _, __: case.allowed, 1)),
        (suppress, lambda: tf.SuppressTokensLogitsProcessor(suppress)),
        (begin, lambda: tf.SuppressTokensAtBeginLogitsProcessor(begin, start)),
    )
    return [make() for wanted, make in table if wanted]


def _warpers(case: SamplingCase) -> list[Any]:
    """Transformers' warpers in its order."""
    import transformers as tf

    table: tuple[tuple[Any, Callable[[], Any]], ...] = (
        (True, lambda: tf.TemperatureLogitsWarper(case.temperature)),
        (case.top_k, lambda: tf.TopKLogitsWarper(case.top_k)),
        (case.top_p < 1, lambda: tf.TopPLogitsWarper(case.top_p)),
        (case.min_p, lambda: tf.MinPLogitsWarper(case.min_p)),
        (case.typical_p < 1, lambda: tf.TypicalLogitsWarper(case.typical_p)),
        (case.epsilon_cutoff, lambda: tf.EpsilonLogitsWarper(case.epsilon_cutoff)),
        (case.eta_cutoff, lambda: tf.EtaLogitsWarper(case.eta_cutoff)),
    )
    return [make() for wanted, make in table if wanted]


def process(logits: torch.Tensor, past: torch.Tensor, case: SamplingCase) -> torch.Tensor:
    """Scores after processors, and after warpers where tokens are drawn.

    Args:
        logits: [N, V].
        past: Token ids of each row, [N, T]; those behind the length of the case's prompt are its
            reply.
        case: Parameters, the same for all rows.

    Returns:
        [N, V], float64; −inf where a token is removed.
    """
    scores = logits.double()
    for step in _rules(case) + (_warpers(case) if case.temperature > 0 else []):
        scores = step(past, scores)
    return scores


def _processed(logits: torch.Tensor, case: SamplingCase) -> torch.Tensor:
    past = torch.tensor([[*case.prompt, *case.reply]], dtype=torch.long)
    return process(logits[None], past, case)[0]


def draw(
    logits: torch.Tensor, case: SamplingCase, keys: tuple[tuple[int, int, int], ...]
) -> tuple[tuple[int, ...], int]:
    """Tokens drawn from one row, and how many tokens the filters leave.

    Args:
        logits: [V], float32.
        case: Parameters; temperature 0 is greedy.
        keys: (seed, step, sample) of each draw.
    """
    scores = _processed(logits, case).numpy()
    if case.temperature == 0:
        return (int(np.argmax(scores)),) * len(keys), 1
    tokens = [
        int(np.argmax(scores + gumbel_noise(len(scores), step, sample, seed)))
        for seed, step, sample in keys
    ]
    return tuple(tokens), int(np.isfinite(scores).sum())


def distribution(logits: torch.Tensor, case: SamplingCase) -> tuple[tuple[int, float], ...]:
    """(token id, probability) of everything that the filters leave."""
    p = torch.softmax(_processed(logits, case), dim=0)
    return tuple((int(i), float(p[i])) for i in p.nonzero()[:, 0])
