"""The only tokens that may follow: a list, or what a callback says at each step.

With a callback a grammar engine drives the sampler; it is asked once per row and step.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from headport.errors import RequestError
from headport.runtime.sampling.callbacks import ask_callback
from headport.runtime.sampling.columns import columns_of
from headport.runtime.sampling.settings import Context, FixedIds, Sampling

__all__ = ["allowed_columns", "ask_allowed", "keep_allowed"]

Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


def ask_allowed(sampling: Sampling, context: Context) -> Sampling:
    """The same sampling with this step's allowed tokens in place of a callback: asked just once.

    Raises:
        RequestError: If the callback fails, or allows no token.
    """
    allowed = sampling.allowed
    if allowed is None or isinstance(allowed, FixedIds):
        return sampling
    where = f"allowed: the callback of prompt {context.index}, step {len(context.token_ids)}"
    found = ask_callback(where, lambda: allowed(context))
    if found is None:
        return replace(sampling, allowed=None)
    ids = np.asarray(found)
    if ids.dtype != np.bool_ and ids.size and ids.dtype.kind not in "iu":
        raise RequestError(
            f"{where} gave {ids.dtype}, token ids or a bool mask over the vocabulary were expected"
        )
    if not (ids.any() if ids.dtype == np.bool_ else ids.size):
        raise RequestError(f"{where} allows no token; allow an end token where the text is done")
    return replace(sampling, allowed=lambda _: ids)


def allowed_columns(ids: Int64, sampling: Sampling, context: Context) -> Mask:
    """Which columns `allowed` leaves; ids that do not exist are left out.

    Raises:
        RequestError: If a mask is not of the vocabulary's size.
    """
    assert sampling.allowed is not None
    found = np.asarray(sampling.allowed(context))
    if found.dtype == np.bool_:
        if found.ndim != 1 or len(found) <= ids[-1]:
            raise RequestError(
                f"allowed: a mask over the vocabulary, bool [{int(ids[-1]) + 1}] or longer, was "
                f"expected, bool {list(found.shape)} was given"
            )
        mask: Mask = found[ids]
        return mask
    mask = np.zeros(len(ids), np.bool_)
    mask[columns_of(ids, found.astype(np.int64).ravel())] = True
    return mask


def keep_allowed(scores: Float64, ids: Int64, sampling: Sampling, context: Context) -> Float64:
    """Ban all that is not allowed. Where all that is allowed was banned before, that score is 0."""
    allowed = allowed_columns(ids, sampling, context)
    if not np.isfinite(scores[allowed]).any():
        return np.where(allowed, 0.0, -np.inf)
    return np.where(allowed, scores, -np.inf)
