"""What candidates decide is what the full row gives, and what they cannot decide is left open."""

import numpy as np
import pytest

from headport.runtime.sampling.candidates import (
    CandidateRow,
    decide,
    decide_noisy,
    noise_row,
    wants_noise,
)
from headport.runtime.sampling.noise import NoiseKey, draw_bits, gumbel, gumbel_bound
from headport.runtime.sampling.processed_candidates import Plan, steer
from headport.runtime.sampling.sampler import choose
from headport.runtime.sampling.settings import Sampling

IDS = np.arange(40)


def row_of(seed: int) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=len(IDS)) * 3).astype(np.float32)


def picked(logits: np.ndarray, count: int, noise: np.ndarray | None = None) -> CandidateRow:
    """The best by logit + noise, with nothing in doubt."""
    keys = logits.astype(np.float64) + (0 if noise is None else noise)
    order = np.argsort(-keys, kind="stable")
    ids = np.sort(order[:count])
    ids = ids[np.argsort(-logits[ids], kind="stable")]
    cut = float(keys[order[count]]) if count < len(keys) else -np.inf
    values = logits[ids].astype(np.float64)
    proved = int((values > cut).sum()) if noise is None else 0
    return CandidateRow(IDS[ids], values, proved, cut, 0.0)


def tail_of(logits: np.ndarray, row: CandidateRow, doubt: float = 0.0):
    outside = np.delete(logits.astype(np.float64), row.ids) - row.logits[0]

    def mass(temperature: float) -> tuple[float, float]:
        low, high = ((outside + d) / temperature for d in (-doubt, doubt))
        return float(np.exp(low).sum()), float(np.exp(high).sum())

    return mass


FILTERED = [
    Sampling(),
    Sampling(1.0, top_k=5),
    Sampling(1.2, top_k=5, top_p=0.8),
    Sampling(1.2, top_k=5, min_p=0.1),
    Sampling(1.0, top_p=0.5),
    Sampling(0.7, top_p=0.9),
    Sampling(1.0, top_p=0.9, min_p=0.1),
    Sampling(1.0, min_p=0.1),
    Sampling(1.5, min_p=0.3),
]


@pytest.mark.parametrize("sampling", FILTERED, ids=repr)
def test_what_is_decided_is_what_the_full_row_gives(sampling):
    decided = 0
    for step in range(200):
        logits, key = row_of(step), NoiseKey(3, step)
        row = picked(logits, 12)
        found = decide(row, sampling, key, tail_of(logits, row))
        if found is not None:
            decided += 1
            assert found == choose(logits, IDS, sampling, key)
    assert decided > 150


def test_a_doubtful_tail_decides_less_and_never_wrongly():
    sampling, decided = Sampling(1.0, top_p=0.9), []
    for doubt in (0.0, 0.5, 4.0):
        decided.append(0)
        for step in range(200):
            logits, key = row_of(step), NoiseKey(3, step)
            row = picked(logits, 6)
            found = decide(row, sampling, key, tail_of(logits, row, doubt))
            if found is not None:
                decided[-1] += 1
                assert found == choose(logits, IDS, sampling, key)
    assert decided[0] > decided[1] > decided[2]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5, 8.0])
def test_noise_is_decided_like_an_argmax(temperature):
    sampling, decided = Sampling(temperature), 0
    assert wants_noise(sampling)
    for step in range(200):
        logits, key = row_of(step), NoiseKey(4, step)
        row = picked(logits, 6, noise_row(IDS, len(IDS), temperature, key))
        found = decide_noisy(row, sampling, key)
        if found is not None:
            decided += 1
            assert found == choose(logits, IDS, sampling, key)
    assert decided > 195


def test_min_p_through_noise_needs_the_largest_logit():
    sampling, decided = Sampling(1.0, min_p=0.05), 0
    for step in range(200):
        logits, key = row_of(step), NoiseKey(4, step)
        row = picked(logits, 6, noise_row(IDS, len(IDS), 1.0, key))
        assert decide_noisy(row, sampling, key) is None
        found = decide_noisy(row, sampling, key, float(logits.max()))
        if found is not None:
            decided += 1
            assert found == choose(logits, IDS, sampling, key)
    assert 100 < decided < 200  # where the winner is filtered out, the next is not looked for


def test_noise_handed_to_the_head_is_never_below_the_true_noise():
    key = NoiseKey(9, 1)
    bits = draw_bits(key, 5000)
    for temperature in (1e-3, 0.8, 1.0, 37.0):
        noise = noise_row(np.arange(5000), 5003, temperature, key)
        assert (noise[:5000].astype(np.float64) >= temperature * gumbel(bits)).all()
        assert np.isneginf(noise[5000:]).all()
    edge = np.array([0, 1, 2**31, 2**32 - 2, 2**32 - 1], np.uint32)
    assert (gumbel_bound(edge).astype(np.float64) >= gumbel(edge)).all()
    assert (gumbel_bound(edge) - gumbel(edge))[2:].max() < 0.02


def test_noise_follows_original_ids():
    key, ids = NoiseKey(9, 1), np.array([7, 2, 30])
    assert noise_row(ids, 3, 1.0, key).tolist() == noise_row(IDS, 40, 1.0, key)[ids].tolist()


def test_nothing_proved_decides_nothing():
    row = CandidateRow(IDS[:3], np.array([3.0, 2, 1]), 0, 9.0, 0.0)
    for sampling in FILTERED:
        assert decide(row, sampling, NoiseKey(1, 0), lambda _: (0.0, 0.0)) is None
    assert decide_noisy(row, Sampling(1.0), NoiseKey(1, 0)) is None


def test_equal_best_logits_go_to_the_lowest_original_id():
    row = CandidateRow(np.array([9, 4, 7]), np.array([2.0, 2, 1]), 2, 0.0, 0.0)
    assert decide(row, Sampling(), None, lambda _: (0.0, 0.0)) == 4


def test_equal_best_logits_that_are_not_proved_equal_are_left_open():
    row = CandidateRow(np.array([9, 4, 7]), np.array([2.0, 2, 1]), 1, 0.0, 1e-9)
    assert decide(row, Sampling(), None, lambda _: (0.0, 0.0)) is None


def test_top_k_needs_its_last_place_and_all_ties_to_be_proved():
    logits = np.array([3.0, 2, 1, 1, 0])
    sampling, key = Sampling(1.0, top_k=3), NoiseKey(1, 0)

    def found(count: int, proved: int) -> int | None:
        row = CandidateRow(np.arange(count), logits[:count], proved, 0.5, 0.0)
        return decide(row, sampling, key, lambda _: (0.0, 0.0))

    assert found(2, 2) is None  # no third candidate
    assert found(4, 2) is None
    assert found(4, 3) is None  # a fourth ties with it and is not proved
    assert found(4, 4) == choose(logits.astype(np.float32), np.arange(5), sampling, key)


def test_scores_within_rounding_are_left_open():
    key = NoiseKey(1, 0)
    g = gumbel(draw_bits(key, 2))
    logits = np.array([0.0, float(g[0] - g[1])])  # z + g is equal
    ids = np.argsort(-logits)
    row = CandidateRow(ids, logits[ids], 0, -50.0, 1e-15)
    assert decide_noisy(row, Sampling(1.0), key) is None


@pytest.mark.parametrize("more", [{}, {"top_p": 0.9}, {"min_p": 0.1}], ids=str)
def test_top_k_heeds_the_error_of_its_logits(more):
    sampling, decided = Sampling(1.0, top_k=5, **more), []
    for error in (0.0, 0.05):
        decided.append(0)
        for step in range(200):
            logits, key = row_of(step), NoiseKey(3, step)
            row = picked(logits, 12)
            rng = np.random.default_rng(step)
            moved = row.logits + rng.uniform(-error, error, len(row.ids))
            if (np.diff(moved) >= 0).any():
                continue  # the head proves no such order
            row = CandidateRow(row.ids, moved, row.proved, row.cut, error)
            found = decide(row, sampling, key, lambda _: (0.0, 0.0))
            if found is not None:
                decided[-1] += 1
                assert found == choose(logits, IDS, sampling, key)
    assert decided[0] > decided[1] > 0
    near = CandidateRow(IDS[:3], np.array([3.0, 2.5, -9.0]), 3, -np.inf, 1e3)
    assert decide(near, Sampling(1.0, top_k=2), NoiseKey(1, 0), lambda _: (0.0, 0.0)) is None


def test_a_top_p_border_within_the_error_of_masses_is_left_open():
    # The second token's masses: 1/(1 + 1), so that it stays for p just above a half.
    sampling, ids = Sampling(1.0, top_p=0.5 + 1e-4), np.arange(2)
    key = next(
        k for k in (NoiseKey(n, 0) for n in range(99)) if np.diff(gumbel(draw_bits(k, 2)))[0] > 2
    )  # the second wins where it stays

    def found(error: float) -> int | None:
        row = CandidateRow(ids, np.array([1.0, 1.0]), 2, -np.inf, error)
        return decide(row, sampling, key, lambda _: (0.0, 0.0))

    assert found(0.0) == 1
    assert found(1e-3) is None


def test_lifted_tokens_are_picked_at_every_temperature():
    for temperature in (1e-30, 1.0, 1e30):
        noise = noise_row(IDS, len(IDS), temperature, NoiseKey(9, 1))
        plan = Plan(np.ones(len(IDS), np.bool_), np.array([4, 30]))
        keys = steer(noise, plan)
        assert set(np.argsort(-keys)[:2].tolist()) == {4, 30}


def test_a_cut_above_the_min_p_threshold_is_left_open():
    key = NoiseKey(1, 0)
    values = np.array([3.0, 2.0, -9.0])
    for cut, open_ in ((-5.0, False), (2.5, True)):
        row = CandidateRow(IDS[:3], values, 1 if open_ else 3, cut, 0.0)
        found = decide(row, Sampling(1.0, min_p=0.1), key, lambda _: (0.0, 0.0))
        assert (found is None) is open_
