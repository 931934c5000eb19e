import re

import numpy as np
import pytest

from headport.errors import NonFiniteError
from headport.runtime.sampling.filters import (
    keep,
    keep_epsilon,
    keep_eta,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    keep_typical,
    scale,
)
from headport.runtime.sampling.noise import NoiseKey, draw_bits, gumbel
from headport.runtime.sampling.sampler import choose, faults
from headport.runtime.sampling.settings import Context, Sampling

KEY = NoiseKey(seed=7, step=0)


def logits_of(*probabilities: float) -> np.ndarray:
    return np.log(np.array(probabilities)).astype(np.float32)


def kept(mask: np.ndarray) -> list[int]:
    return np.flatnonzero(mask).tolist()


def test_top_k_keeps_the_largest():
    assert kept(keep_top_k(logits_of(0.1, 0.4, 0.2, 0.3), 2)) == [1, 3]


def test_top_k_keeps_all_ties_at_the_last_place():
    row = np.array([3, 2, 2, 2, 1], np.float32)
    assert kept(keep_top_k(row, 2)) == [0, 1, 2, 3]
    assert kept(keep_top_k(row, 1)) == [0]


@pytest.mark.parametrize("k", [4, 5, 50, 10**9])
def test_top_k_above_the_vocabulary_keeps_all(k):
    assert kept(keep_top_k(logits_of(0.1, 0.4, 0.2, 0.3), k)) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("p", "expected"),
    [
        (0.0, [1]),  # the most likely one always stays
        (1e-8, [1]),
        (0.39, [1]),
        (0.45, [1, 3]),
        (0.75, [1, 2, 3]),
        (0.95, [0, 1, 2, 3]),
    ],
)
def test_top_p_keeps_the_smallest_set_that_reaches_the_mass(p, expected):
    assert kept(keep_top_p(logits_of(0.1, 0.4, 0.2, 0.3), 1.0, p)) == expected


def test_top_p_threshold_side():
    # Four equal quarters: sums .25, .5, .75, 1 are exact; a sum of exactly 1 - p goes.
    row = np.zeros(4, np.float32)
    assert kept(keep_top_p(row, 1.0, 0.75)) == [0, 1, 2]
    assert kept(keep_top_p(row, 1.0, 0.7500001)) == [0, 1, 2, 3]


def test_top_p_ties_stay_by_lowest_position():
    row = np.array([0, 1, 0, 0], np.float32)
    assert kept(keep_top_p(row, 1.0, 0.6)) == [0, 1]
    assert kept(keep_top_p(np.zeros(3, np.float32), 1.0, 0.0)) == [0]


def test_top_p_sees_the_temperature():
    row = logits_of(0.6, 0.4)
    assert kept(keep_top_p(row, 1.0, 0.59)) == [0]
    assert kept(keep_top_p(row, 5.0, 0.59)) == [0, 1]


def test_min_p_is_a_share_of_the_largest():
    row = logits_of(0.5, 0.3, 0.15, 0.05)
    assert kept(keep_min_p(row, 1.0, 0.2)) == [0, 1, 2]
    assert kept(keep_min_p(row, 1.0, 1.0)) == [0]
    assert kept(keep_min_p(np.zeros(3, np.float32), 1.0, 1.0)) == [0, 1, 2]


def test_top_p_counts_the_mass_that_top_k_left():
    # Of .4 + .3 the first is 57 %: enough for p = 0.5. Over all four it would not be.
    row = logits_of(0.1, 0.2, 0.3, 0.4)
    assert keep(row, Sampling(1.0, top_k=2, top_p=0.5)).tolist() == [3]
    assert keep(row, Sampling(1.0, top_p=0.5)).tolist() == [2, 3]


@pytest.mark.parametrize("temperature", [1e-300, 1e-3, 1.0, 1e30])
def test_any_temperature_leaves_finite_work(temperature):
    row = np.array([5.0, -3.0e38, 4.0], np.float32)
    scaled = scale(row, temperature)
    assert scaled[0] == 0.0 and (scaled <= 0).all() and not np.isnan(scaled).any()
    token = choose(row, np.arange(3), Sampling(temperature, top_p=0.9), KEY)
    assert token in (0, 1, 2) and (temperature > 1e-2 or token == 0)


def test_greedy_takes_the_lowest_id_of_a_tie_and_needs_no_key():
    row = np.array([1, 3, 3, 0], np.float32)
    assert choose(row, np.array([10, 20, 30, 40]), Sampling(), None) == 20


def test_sampling_is_the_argmax_of_scaled_logits_and_noise_by_original_id():
    row = np.array([0.3, -0.2, 0.1, 0.9], np.float32)
    ids = np.array([2, 5, 6, 11])
    for step in range(50):
        key = NoiseKey(3, step)
        noise = gumbel(draw_bits(key, 12))[ids]
        expected = ids[np.argmax(row.astype(np.float64) / 0.7 + noise)]
        assert choose(row, ids, Sampling(0.7), key) == expected


def test_typical_keeps_what_is_near_the_mean_surprise():
    # H = .9 · ln(1/.3) + .1 · ln(10): nearest are the three of .3, then .1
    row = logits_of(0.3, 0.3, 0.1, 0.3)
    assert kept(keep_typical(row, 1.0, 0.5)) == [0, 1, 3]
    assert kept(keep_typical(row, 1.0, 0.95)) == [0, 1, 2, 3]
    # One token of .9 is less surprising than the mean; at .01 the nearest one alone stays.
    peaked = logits_of(0.9, 0.05, 0.03, 0.02)
    assert kept(keep_typical(peaked, 1.0, 0.01)) == [0]


def test_typical_may_leave_the_most_likely_token_out():
    # H = 2.46: the surprise of .05 is 0.54 from it, that of .3 is 1.25
    row = logits_of(0.3, *[0.05] * 14)
    assert kept(keep_typical(row, 1.0, 0.3)) == list(range(1, 15))


@pytest.mark.parametrize(("epsilon", "expected"), [(0.05, [0, 1, 2]), (0.15, [0, 1]), (0.99, [0])])
def test_epsilon_keeps_the_likely_and_always_the_best(epsilon, expected):
    assert kept(keep_epsilon(logits_of(0.6, 0.3, 0.1), 1.0, epsilon)) == expected
    assert kept(keep_epsilon(np.zeros(3, np.float32), 1.0, epsilon)) == [0, 1, 2]


def test_eta_falls_with_the_entropy():
    flat = np.zeros(100, np.float32)
    flat[0] = 0.1
    assert len(kept(keep_epsilon(flat, 1.0, 0.02))) == 1
    assert len(kept(keep_eta(flat, 1.0, 0.02))) == 100  # η = √.02 · exp(-ln 100) = .0014


def test_filters_do_not_move_the_noise():
    # The unfiltered winner, where it is kept, wins under the filter as well.
    row = np.random.default_rng(0).normal(size=257).astype(np.float32)
    ids = np.arange(257)
    top = set(np.flatnonzero(keep_top_k(row, 100)).tolist())
    same = 0
    for step in range(200):
        key = NoiseKey(5, step)
        free = choose(row, ids, Sampling(1.0), key)
        filtered = choose(row, ids, Sampling(1.0, top_k=100), key)
        assert filtered in top and (filtered == free or free not in top)
        same += filtered == free
    assert 100 < same < 200


@pytest.mark.parametrize("size", [1, 2, 31, 33, 257, 1009])
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(1.0),
        Sampling(0.7, 50),
        Sampling(0.7, 0, 0.9),
        Sampling(1.3, 40, 0.9, 0.05),
        Sampling(1.0, typical_p=0.5),
        Sampling(1.3, epsilon_cutoff=0.1, eta_cutoff=0.2),
        Sampling(0.7, repetition_penalty=1.3, frequency_penalty=0.5, no_repeat_ngram_size=9),
        Sampling(logit_bias=(((0,), 1.0),), bad_words=((0, 0, 0),), min_new_tokens=1),
    ],
    ids=str,
)
def test_any_vocabulary_size(size, sampling):
    row = np.random.default_rng(size).normal(size=size).astype(np.float32)
    past = Context((0, size - 1, size + 5), (0,))  # ids beyond the head's columns are skipped
    assert 0 <= choose(row, np.arange(size), sampling, KEY, past) < size


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("position", [0, 128, 256])
def test_rows_that_are_not_finite_are_refused_by_name(bad, position):
    rows = np.zeros((3, 257), np.float32)
    names = [(4, 1), (5, 9), (6, 3)]
    assert faults(rows, names) == {}
    rows[1, position] = bad
    found = faults(rows, names)
    assert found.keys() == {1} and isinstance(found[1], NonFiniteError)
    assert re.search(f"row 5, step 9: 1 of 257 .* position {position}", str(found[1]))


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(0.7),
        Sampling(1.0, top_k=1),
        Sampling(1.0, top_k=7),
        Sampling(1.0, top_p=0.9),
        Sampling(0.5, top_k=50, top_p=0.95),
        Sampling(1.5, top_p=0.3, min_p=0.1),
        Sampling(1.0, min_p=0.05),
        Sampling(0.9, top_k=300, top_p=0.999, min_p=0.001),
        Sampling(1.0, top_p=0.0),
    ],
)
def test_filters_keep_what_transformers_keeps(sampling):
    torch = pytest.importorskip("torch")
    from transformers.generation.logits_process import (
        LogitsProcessorList,
        MinPLogitsWarper,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    chain = LogitsProcessorList([TemperatureLogitsWarper(sampling.temperature)])
    if sampling.top_k:
        chain.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        chain.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        chain.append(MinPLogitsWarper(sampling.min_p))
    rng = np.random.default_rng(1)
    for size in (2, 33, 257, 1009):
        rows = (rng.normal(size=(20, size)) * 4).astype(np.float32)
        processed = chain(None, torch.from_numpy(rows)).numpy()
        for row, expected in zip(rows, processed, strict=True):
            assert keep(row, sampling).tolist() == np.flatnonzero(np.isfinite(expected)).tolist()


def test_top_k_ties_are_those_of_transformers():
    torch = pytest.importorskip("torch")
    from transformers.generation.logits_process import TopKLogitsWarper

    rows = np.random.default_rng(2).integers(0, 9, (30, 64)).astype(np.float32)
    for row in rows:
        expected = TopKLogitsWarper(10)(None, torch.from_numpy(row[None]))[0].numpy()
        assert kept(keep_top_k(row, 10)) == kept(np.isfinite(expected))
