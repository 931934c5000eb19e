"""What the model would say after each of its layers; part of the reference's process.

The state between two layers is put in the place of what leaves the last one, and the model's own
norm, head, scale and softcap read it ("logit lens", nostalgebraist 2020, LessWrong).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from headport.validate.layers import LayerWatch

__all__ = ["read_layers"]

_STAGES_AT_ONCE = 8
# The last stage is the model itself; in another batch its sums come out in another order.
_RELATIVE_NOISE = 1e-3


def read_layers(model: Any, token_ids: torch.Tensor) -> torch.Tensor | None:
    """Log-probabilities of the next token after each layer.

    Args:
        model: The reference.
        token_ids: One window, [1, T].

    Returns:
        [L + 1, T, V] float32: before layer 0, before layer 1, …, after the last, which is what the
        model says. None where there is no single state between its layers, or where more than the
        last layer's state decides what it says.
    """
    watch = LayerWatch(model)
    said: list[torch.Tensor] = []

    def run() -> None:
        said.append(model(input_ids=token_ids, use_cache=False).logits)

    with torch.inference_mode():
        states = watch.states(run)
        if states is None:
            return None
        stages = torch.split(torch.from_numpy(states[:-1]), _STAGES_AT_ONCE)
        found = torch.cat([_read(model, watch.last, part, token_ids) for part in stages])
        plain = said[0][0].float()
        if (found[-1] - plain).abs().max() > _RELATIVE_NOISE * plain.abs().max():
            return None
        return torch.log_softmax(found, dim=-1)


def _read(model: Any, last: Any, states: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Logits [S, T, V] where states [S, T, H] leave the last layer."""
    hook = last.register_forward_hook(_replace_output(states))
    try:
        rows = token_ids.expand(len(states), -1)
        logits: torch.Tensor = model(input_ids=rows, use_cache=False).logits
        return logits.float()
    finally:
        hook.remove()


def _replace_output(states: torch.Tensor) -> Callable[..., Any]:
    def replace(_module: Any, _args: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (states.to(output[0].dtype), *output[1:])
        return states.to(output.dtype)

    return replace
