"""The worst positions: the largest KL of all blocks, few, with their text."""

from __future__ import annotations

import numpy as np

from headport.metrics import score_rows
from headport.validate.documents import Document, Window
from headport.validate.worst import WorstPositions, shorten


def offer(worst: WorstPositions, shifts: list[float], at: int) -> None:
    """One block whose row i moves logit 1 by shifts[i], away from equal logits."""
    z = np.zeros((len(shifts), 4), np.float32)
    c = z.copy()
    c[:, 1] = shifts
    bound = np.zeros(len(z))
    scores = score_rows(z, c, np.zeros(len(z), np.int64), bound)
    ids = np.arange(20)
    everything = np.ones(19, np.bool_)
    window = Window(3, 0, ids[:-1], ids[1:], everything)
    worst.offer(0, window, at + np.arange(len(z)), (z, c), scores)


def test_the_largest_are_kept_across_blocks() -> None:
    worst = WorstPositions(limit=3)
    offer(worst, [0.1, 0.9, 0.2], at=0)
    offer(worst, [0.8, 0.0, 0.7], at=3)
    document = Document(3, "", np.arange(20), 20, np.ones(19, np.int64), np.ones(19, np.bool_))
    found = worst.positions(["prose"], [[document]], lambda ids: " ".join(map(str, ids)))
    assert [p.token for p in found] == [2, 4, 6], "position i scores token i + 1"
    assert [p.kl for p in found] == sorted((p.kl for p in found), reverse=True)
    assert found[0].context == "0 1" and found[0].target == "2"
    assert (found[0].slice, found[0].document) == ("prose", 3)
    assert (found[0].reference_top1, found[0].candidate_top1) == ("0", "1")
    assert found[0].reference_margin == 0.0


def test_positions_without_drift_are_not_listed() -> None:
    worst = WorstPositions(limit=3)
    offer(worst, [0.0, 0.0], at=0)
    assert worst.positions(["prose"], [[]], str) == ()


def test_shorten_keeps_the_end() -> None:
    assert shorten("a" * 100 + "b") == "…" + "a" * 78 + "b"
    assert shorten("short") == "short"
