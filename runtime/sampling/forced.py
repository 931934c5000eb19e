"""Tokens that a bundle's generation_config puts at the begin and at the end of every reply."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from headport.runtime.sampling.columns import columns_of
from headport.runtime.sampling.settings import Context, Sampling

__all__ = ["force_ids", "forced_ids"]

Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]


def forced_ids(sampling: Sampling, context: Context) -> tuple[int, ...]:
    """The only ids that may come now; none where nothing is forced.

    As `ForcedEOSTokenLogitsProcessor` and `ForcedBOSTokenLogitsProcessor` of transformers, of which
    the first overrules the second.
    """
    new = len(context.token_ids)
    if sampling.forced_eos and new + 1 == context.max_new_tokens:
        return sampling.forced_eos
    if sampling.forced_bos is not None and new + context.prompt_length == 1:
        return (sampling.forced_bos,)
    return ()


def force_ids(scores: Float64, ids: Int64, sampling: Sampling, context: Context) -> Float64:
    """Give what is forced a score of 0, whatever it had, and ban all else."""
    forced = forced_ids(sampling, context)
    if not forced:
        return scores
    found = np.full_like(scores, -np.inf)
    found[columns_of(ids, np.array(forced, np.int64))] = 0.0
    return found
