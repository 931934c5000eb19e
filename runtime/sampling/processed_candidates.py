"""Candidates of a row whose scores the request's processors change.

Bans and lifts do not depend on scores, so they are known before the head runs. The head is handed
them as noise: a banned token is never picked, a lifted one always, and then no processor can move
a token that was not picked above `cut`.

    plan_row  bans, lifts, noise ─► noise row of the head ─► its candidates ─► process_row
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from headport.runtime.sampling.candidates import CandidateRow
from headport.runtime.sampling.columns import columns_of
from headport.runtime.sampling.processors import PROCESSORS, apply_processors, overruled
from headport.runtime.sampling.settings import Context, Sampling

__all__ = ["Plan", "plan_row", "process_row", "steer"]

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

_ALWAYS = np.float32(1e35)  # above any bound of a logit with noise, which is up to 1e30 · 23
_ROUNDING = 2.0**-40  # relative, of the few float64 operations of the processors


@dataclass(frozen=True)
class Plan:
    """What is known of a row before its head runs."""

    alive: Mask  # which ids no processor bans, by ascending original id, [K]
    lifted: Int64  # positions among them that a processor may lift


def plan_row(ids: Int64, sampling: Sampling, context: Context) -> Plan | None:
    """Bans and lifts of a row; None where only all logits can tell.

    Args:
        ids: Original ids, ascending, [K].
        sampling: How the token is chosen; at least one processor acts, none is the caller's own.
        context: The row's past.
    """
    if overruled(ids, sampling, context):
        return None  # what is allowed was banned before: its scores are no longer the model's
    alive = apply_processors(np.zeros(len(ids)), ids, sampling, context) > -np.inf
    if not alive.any():
        return None
    acting = (processor for processor in PROCESSORS if processor.acts(sampling))
    lifted = [i for processor in acting for i in processor.lifts(sampling, context)]
    columns = columns_of(ids, lifted)
    return Plan(alive, columns[alive[columns]])


def steer(noise: Float32, plan: Plan) -> Float32:
    """A head's noise row under which banned tokens are never picked and lifted ones always are.

    Args:
        noise: Of each head column, -inf where it is no token, [columns].
        plan: The row's bans and lifts, of the K columns that are tokens.
    """
    steered = noise.copy()
    tokens = steered[: len(plan.alive)]
    tokens[~plan.alive] = -np.inf
    tokens[plan.lifted] = _ALWAYS
    return steered


def process_row(
    row: CandidateRow, plan: Plan, ids: Int64, sampling: Sampling, context: Context
) -> CandidateRow | None:
    """The candidates with processed scores, best first; None where all of them are banned.

    Args:
        row: Candidates picked under `steer`, so that `cut` holds for all others.
        plan: The row's bans and lifts.
        ids: Original ids, ascending, [K].
        sampling: As for `plan_row`.
        context: The row's past.
    """
    order = np.argsort(row.ids)
    own = row.ids[order]
    scores = apply_processors(row.logits[order], own, replace(sampling, allowed=None), context)
    scores[~plan.alive[columns_of(ids, own)]] = -np.inf
    alive = np.flatnonzero(scores > -np.inf)
    if not len(alive):
        return None
    scores, own = scores[alive], own[alive]
    best = np.argsort(-scores, kind="stable")
    scores, own = scores[best], own[best]
    p = sampling.repetition_penalty
    error = row.error * max(1.0, p, 1.0 / p)
    slack = 4 * error + (float(np.abs(scores).max()) + 32.0) * _ROUNDING
    gaps = scores - np.append(scores[1:], -np.inf)
    certain = (scores - slack > row.cut) & (gaps > slack)
    proved = len(certain) if certain.all() else int(np.argmin(certain))
    return CandidateRow(own, scores, proved, row.cut, error)
