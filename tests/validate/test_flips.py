"""Other first choices are counted by what explains them."""

from __future__ import annotations

from typing import Any

import numpy as np

from headport.validate.documents import Window
from headport.validate.evidence import Flips
from headport.validate.flips import FlipCounts


def counted(z: Any, c: Any, bound: float) -> Flips:
    flips = FlipCounts()
    ids = np.arange(len(z) + 1)
    window = Window(3, 0, ids[:-1], ids[1:], np.ones(len(z), np.bool_))
    logits = (np.asarray(z, np.float32), np.asarray(c, np.float32))
    flips.offer(0, window, np.arange(len(z)), logits, np.full(len(z), bound))
    return flips.flips(["prose"], lambda found: str(found[0]))


def test_near_ties_noise_and_what_neither_explains() -> None:
    rng = np.random.default_rng(0)
    z = rng.normal(size=(4, 500))
    z[:, 7] = z.max(axis=1) + 1.0
    c = z + 0.01 * rng.normal(size=z.shape)
    z[1, 9], c[1, 9] = z[1, 7] - 1e-6, c[1, 7] + 1e-3  # within the bound
    z[2, 9], c[2, 9] = z[2, 7] - 0.02, c[2, 7] + 0.01  # three times the noise
    z[3, 9], c[3, 9] = z[3, 7] - 0.9, c[3, 7] + 0.01  # far beyond it
    found = counted(z, c, bound=1e-5)
    assert (found.positions, found.near_ties, found.within_noise, found.beyond_noise) == (
        4,
        1,
        1,
        1,
    )
    widest = found.widest[0]
    assert (widest.slice, widest.document, widest.token) == ("prose", 3, 4)
    assert (widest.reference_top1, widest.candidate_top1) == ("7", "9")
    assert widest.margin > 0.5 > widest.logit_noise


def test_a_shift_of_all_logits_is_no_noise() -> None:
    z = np.zeros((1, 500))
    z[0, 1] = 1.0
    c = z + 5.0
    c[0, 2] = 6.1  # chosen instead, by more than the others moved against each other
    assert counted(z, c, bound=0.0).beyond_noise == 1


def test_the_noise_is_that_of_the_run_not_of_the_faulty_position() -> None:
    rng = np.random.default_rng(0)
    z = rng.normal(size=(64, 500))
    c = z + 0.001 * rng.normal(size=z.shape)
    c[40] = z[40] + 2.0 * rng.normal(size=500)  # spread wide enough to explain any flip
    assert c[40].argmax() != z[40].argmax()
    found = counted(z, c, bound=0.0)
    assert found.noise < 0.0011
    assert found.beyond_noise == 1 and found.widest[0].logit_noise > 1


def test_the_noise_does_not_depend_on_blocks() -> None:
    rng = np.random.default_rng(0)
    z = rng.normal(size=(50, 20)).astype(np.float32)
    c = (z + rng.normal(size=z.shape)).astype(np.float32)
    whole, parts = FlipCounts(), FlipCounts()
    ids = np.arange(51)
    window = Window(0, 0, ids[:-1], ids[1:], np.ones(50, np.bool_))
    at, none = np.arange(50), np.zeros(50)
    whole.offer(0, window, at, (z, c), none)
    for start in range(0, 50, 7):
        rows = slice(start, start + 7)
        parts.offer(0, window, at[rows], (z[rows], c[rows]), none[rows])
    assert whole.flips(["a"], str) == parts.flips(["a"], str)
