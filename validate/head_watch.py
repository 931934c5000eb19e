"""What goes into the reference's head and what comes out of it; part of the reference's process."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from headport.validate.sourced_model import SourcedModel

__all__ = ["HeadWatch"]

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]

_UNIT_ROUNDOFF = 2.0**-24  # float32, round to nearest


class HeadWatch:
    """Sees what goes into the head's matrix and what comes out of it.

    Of an encoder-decoder model also what its decoder gives, which the model may scale on the way.
    """

    def __init__(self, model: Any) -> None:
        self.input: torch.Tensor | None = None
        self.output: torch.Tensor | None = None
        self._states: torch.Tensor | None = None
        module = model.get_output_embeddings()
        weight = getattr(module, "weight", None)
        if isinstance(weight, torch.Tensor) and weight.dim() == 2:
            norms = torch.linalg.vector_norm(weight.detach(), dim=1, dtype=torch.float64)
            self._row_norm = float(norms.max())
            module.register_forward_hook(self._see)
            if isinstance(model, SourcedModel):
                model.get_decoder().register_forward_hook(self._see_states)

    def _see_states(self, _module: Any, _args: Any, output: Any) -> None:
        self._states = output[0]

    def _see(self, _module: Any, args: Any, output: Any) -> None:
        self.input, self.output = args[0], output

    def hidden_states(self) -> Float32 | None:
        """What went into the head last, [T, H]; None for a head that is not watched."""
        states = self.input if self._states is None else self._states
        if states is None:
            return None
        found: Float32 = states.reshape(-1, states.shape[-1]).float().numpy()
        return np.ascontiguousarray(found)

    def product_bound(self) -> Float64:
        """Bound on the rounding of a difference of two products, per position [B, T].

        2 γ ‖h‖ max_v ‖W_v‖ with γ = √H · 2⁻²⁴: a dot product of length H rounds by at most
        γ |h|·|W_v| with high probability, and |h|·|W_v| ≤ ‖h‖ ‖W_v‖.

        Source: Higham & Mary 2019, "A new approach to probabilistic rounding error analysis",
        SIAM J. Sci. Comput. 41(5), theorem 2.4 with λ = 1.
        """
        assert self.input is not None
        hidden = self.input.double()
        norms: Float64 = torch.linalg.vector_norm(hidden, dim=-1).numpy()
        return 2 * math.sqrt(hidden.shape[-1]) * _UNIT_ROUNDOFF * self._row_norm * norms

    def slope(self, logits: torch.Tensor) -> float:
        """Largest |Δlogit / Δhead output| between positions: the scale that follows the head.

        Differences between positions leave out a bias added after the head; a softcap only
        lowers the slope.
        """
        assert self.output is not None
        products, logits = self.output[0].double(), logits[0].double()
        if products.shape != logits.shape or torch.equal(products, logits):
            return 1.0
        steps = (products[1:] - products[:1]).abs()
        clear = steps > 1e-2 * steps.max()  # small steps would divide by rounding noise
        return float(((logits[1:] - logits[:1]).abs()[clear] / steps[clear]).max())
