"""Hidden states rounded to INT8 by one scale for all of them, found beforehand on texts (W8A8).

    x̂ = S_x · clip(round_half_even(x / S_x), −128, 127),  S_x = max |x| over the texts / 127

The head's own graph rounds, so that every kernel gets the same x̂. What is larger than anything in
the texts is cut off.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from headport.bundle import Bundle
from headport.ledger import find_tensor, read_tensor
from headport.manifest import Head

__all__ = ["SCALE", "ZERO", "is_static", "round_statically", "static_step"]

SCALE, ZERO = "hidden_states.scale", "hidden_states.zero"  # initialisers of the head's graph
_LARGEST, _SMALLEST = 127, -128


def is_static(head: Head) -> bool:
    """Whether a head's graph rounds its hidden states by one scale."""
    return head.quantization is not None and head.quantization.activations == "static"


def static_step(bundle: Bundle, head: Head) -> np.float32:
    """S_x of a head, from the bundle's tensor ledger."""
    entry = find_tensor(bundle.manifest, head.graph, SCALE)
    return np.float32(read_tensor(bundle, entry).reshape(-1)[0])


def round_statically(hidden_states: npt.NDArray[Any], step: np.float32) -> npt.NDArray[np.float32]:
    """x̂ [N, H] as the graph computes it."""
    x = hidden_states.astype(np.float32)
    rounded: npt.NDArray[np.float32] = np.clip(np.rint(x / step), _SMALLEST, _LARGEST) * step
    return rounded
