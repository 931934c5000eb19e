"""What goes into every layer of the PyTorch backbone; part of the reference's process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["LayerWatch"]

Float32 = npt.NDArray[np.float32]


class LayerWatch:
    """Records the states between layers while the model runs.

    The layers are the longest list of modules that lies in no other list: experts are lists too,
    inside a layer.
    """

    def __init__(self, model: Any) -> None:
        lists = {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, torch.nn.ModuleList) and len(module)
        }
        outer = [
            module
            for name, module in lists.items()
            if not any(name.startswith(f"{other}.") for other in lists)
        ]
        self._layers: list[Any] = list(max(outer, key=len, default=[]))
        self._head: Any = model.get_output_embeddings()

    @property
    def last(self) -> Any:
        """The last layer's module; there is one where `states` gives any."""
        return self._layers[-1]

    def states(self, run: Callable[[], Any]) -> Float32 | None:
        """States while `run` runs the model on one row.

        Returns:
            [L + 2, T, H]: what goes into each of L layers, what leaves the last, and what goes into
            the head. None where they are not [1, T, H] each, as in models that carry several
            streams, or where there are no such layers.
        """
        if not self._layers or self._head is None:
            return None
        seen: list[list[Any]] = [[] for _ in range(len(self._layers) + 2)]
        hooks = [
            layer.register_forward_pre_hook(_keep_input(into), with_kwargs=True)
            for layer, into in zip((*self._layers, self._head), (*seen[:-2], seen[-1]), strict=True)
        ]
        hooks.append(self._layers[-1].register_forward_hook(_keep_output(seen[-2])))
        try:
            run()
        finally:
            for hook in hooks:
                hook.remove()
        # A path through the cache runs the model more than once, each time on more tokens.
        joined = [torch.cat(parts, dim=1) for parts in seen if _rows_of_one(parts)]
        if len(joined) != len(seen) or len({part.shape for part in joined}) != 1:
            return None
        found: Float32 = torch.cat(joined).float().numpy()
        return np.ascontiguousarray(found)


def _rows_of_one(parts: list[Any]) -> bool:
    return bool(parts) and all(
        isinstance(p, torch.Tensor) and p.dim() == 3 and p.shape[0] == 1 for p in parts
    )


def _keep_input(into: list[Any]) -> Callable[..., None]:
    def see(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        into.append(args[0] if args else kwargs.get("hidden_states"))

    return see


def _keep_output(into: list[Any]) -> Callable[..., None]:
    def see(_module: Any, _args: Any, output: Any) -> None:
        into.append(output[0] if isinstance(output, tuple) else output)

    return see
