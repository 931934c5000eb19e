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
    assert (found.positions, found.near_ties, found.by_noise, found.unexplained) == (4, 1, 1, 1)
    widest = found.widest[0]
    assert (widest.slice, widest.document, widest.token) == ("prose", 3, 4)
    assert (widest.reference_top1, widest.candidate_top1) == ("7", "9")
    assert widest.margin > 0.5 > widest.logit_noise


def test_a_shift_of_all_logits_is_no_noise() -> None:
    z = np.zeros((1, 500))
    z[0, 1] = 1.0
    c = z + 5.0
    c[0, 2] = 6.1  # chosen instead, by more than the others moved against each other
    assert counted(z, c, bound=0.0).unexplained == 1
