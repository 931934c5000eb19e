"""Tiny configurations of causal-LM families, made so that every feature shows in the logits.

Vocabulary 257, hidden size 64, two layers, context 64, windows of 8: rows longer than a window and
as long as the context cost nothing. Weights are random and large (std 0.2), norms vary around one,
so that logits reach several units and nothing is lost in rounding.
"""

from __future__ import annotations

from benchmarks.zoo.dense import DENSE
from benchmarks.zoo.family import Family, Refusal, save_checkpoint
from benchmarks.zoo.refused import REFUSED
from benchmarks.zoo.routed import ROUTED
from benchmarks.zoo_recurrent import RECURRENT

__all__ = ["REFUSED", "ZOO", "Family", "Refusal", "save_checkpoint"]

_RECURRENT = tuple(
    Family(name, config, settings, shows, routed=routed)
    for name, config, settings, shows, routed in RECURRENT
)
ZOO: tuple[Family, ...] = (*DENSE, *ROUTED, *_RECURRENT)
