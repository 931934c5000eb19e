import numpy as np
import pytest

from headport.runtime.sampling.noise import (
    MAX_SEED,
    NoiseKey,
    argmax_with_noise,
    draw_bits,
    gumbel,
    uniform,
)
from tests.runtime.philox import philox4x64

WORD = 2**64 - 1


# The known answers that the authors publish with Random123 (kat_vectors, philox4x64 10).
PUBLISHED = [
    (
        (0, 0, 0, 0),
        (0, 0),
        (0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B),
    ),
    (
        (WORD, WORD, WORD, WORD),
        (WORD, WORD),
        (0x87B092C3013FE90B, 0x438C3C67BE8D0224, 0x9CC7D7C69CD777B6, 0xA09CAEBF594F0BA0),
    ),
    (
        (0x243F6A8885A308D3, 0x13198A2E03707344, 0xA4093822299F31D0, 0x082EFA98EC4E6C89),
        (0x452821E638D01377, 0xBE5466CF34E90C6C),
        (0xA528F45403E61D95, 0x38C72DBD566E9788, 0xA5A1610E72FD18B5, 0x57BD43B5E52B7FE6),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), PUBLISHED)
def test_reference_generator_gives_the_published_answers(counter, key, expected):
    assert philox4x64(counter, key) == expected


@pytest.mark.parametrize(
    ("seed", "sample", "step"),
    [(0, 0, 0), (7, 0, 0), (7, 0, 1), (7, 3, 0), (MAX_SEED, 2, 2**32), (7, 0, WORD)],
)
def test_every_id_has_its_own_counter(seed, sample, step):
    bits = draw_bits(NoiseKey(seed, step, sample), 1009)
    assert bits.dtype == np.uint32 and bits.shape == (1009,)
    for token_id in (0, 1, 7, 8, 500, 1008):
        block = philox4x64((token_id // 8, step, sample, 0), (seed, 0))
        word = block[token_id % 8 // 2]
        half = word >> 32 if token_id % 2 else word & 0xFFFFFFFF
        assert bits[token_id] == half


def test_draws_do_not_depend_on_how_many_ids_there_are():
    key = NoiseKey(7, 3)
    assert (draw_bits(key, 5) == draw_bits(key, 49152)[:5]).all()


def test_draws_differ_between_seeds_samples_and_steps():
    keys = [NoiseKey(7, 3), NoiseKey(8, 3), NoiseKey(7, 4), NoiseKey(7, 3, 1)]
    rows = np.array([draw_bits(key, 64) for key in keys])
    assert len(np.unique(rows)) == rows.size


def test_shared_draws_cannot_be_changed():
    with pytest.raises(ValueError, match="read-only"):
        draw_bits(NoiseKey(7, 3), 8)[0] = 1


def test_the_ends_of_the_uniform_map():
    bits = np.array([0, 1, 2**31, 2**32 - 1], np.uint32)
    expected = [2.0**-33, 3 * 2.0**-33, 0.5 + 2.0**-33, 1 - 2.0**-33]
    assert uniform(bits).tolist() == expected
    low, _, middle, high = gumbel(bits)
    assert low == pytest.approx(-np.log(33 * np.log(2)))
    assert middle == pytest.approx(-np.log(np.log(2)), abs=1e-9)
    assert high == pytest.approx(33 * np.log(2))


@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 5.0, 1000.0])
@pytest.mark.parametrize("size", [1, 2, 31, 33, 257, 1009])
def test_the_short_cut_gives_the_argmax_of_all_scores(size, spread):
    rng = np.random.default_rng(size)
    for step in range(40):
        bits = draw_bits(NoiseKey(1, step), size)
        scaled = rng.normal(size=size) * spread
        assert argmax_with_noise(scaled, bits) == np.argmax(scaled + gumbel(bits))


def test_extreme_draws_win_and_lose():
    bits = np.array([0, 2**32 - 1, 2**31], np.uint32)
    assert argmax_with_noise(np.zeros(3), bits) == 1
    assert argmax_with_noise(np.array([0.0, -np.inf, -30.0]), bits) == 0


def test_equal_scores_go_to_the_lowest_index():
    assert argmax_with_noise(np.zeros(4), np.full(4, 2**31, np.uint32)) == 0


def test_noisy_argmax_samples_the_softmax():
    logits = np.log([0.5, 0.3, 0.15, 0.04, 0.01])
    draws = 20_000
    counts = np.zeros(5)
    for step in range(draws):
        counts[argmax_with_noise(logits, draw_bits(NoiseKey(11, step), 5))] += 1
    expected = np.exp(logits) * draws
    # χ² with 4 degrees of freedom: 18.5 is exceeded once in a thousand seeds.
    assert ((counts - expected) ** 2 / expected).sum() < 18.5
