"""A second code path through the PyTorch model: what differs is rounding, the noise floor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["OtherPath"]

_PROBE_TOKENS = 6
_ROUNDING = 1e-3  # of the largest logit: another path, not another model
_Logits = Callable[[torch.Tensor], torch.Tensor]


class OtherPath:
    """Logits by another attention implementation, else by two halves through the cache.

    The first path is taken that runs and gives the same answers up to rounding; `name` is empty
    if there is none.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        usual = str(getattr(model.config, "_attn_implementation", None))
        self._usual = usual
        self._second = "eager" if usual != "eager" else "sdpa"
        paths: dict[str, _Logits] = {
            f"{self._second} attention instead of {usual}": self._by_attention,
            "two halves through the cache": self._by_halves,
        }
        self.name = ""
        self._path: _Logits = self._by_halves
        for name, path in paths.items():
            if self._works(path):
                self.name, self._path = name, path
                return

    def logits(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Logits [1, T, V] of token ids [1, T]."""
        return self._path(token_ids)

    def _works(self, path: _Logits) -> bool:
        size = int(self._model.get_input_embeddings().weight.shape[0])
        token_ids = torch.arange(_PROBE_TOKENS).remainder(size)[None]
        with torch.inference_mode():
            expected = self._model(input_ids=token_ids, use_cache=False).logits
            try:
                found = path(token_ids)
            except Exception:  # noqa: BLE001 - model code raises many kinds; the path is left out
                return False
        if found.shape != expected.shape:
            return False
        return bool((found - expected).abs().max() <= _ROUNDING * expected.abs().max())

    def _by_attention(self, token_ids: torch.Tensor) -> torch.Tensor:
        self._model.set_attn_implementation(self._second)
        try:
            # transformers only warns where a class knows one way of computing attention.
            if self._model.config._attn_implementation != self._second:
                raise NotImplementedError(f"no {self._second} attention")
            logits: torch.Tensor = self._model(input_ids=token_ids, use_cache=False).logits
        finally:
            self._model.set_attn_implementation(self._usual)
        return logits

    def _by_halves(self, token_ids: torch.Tensor) -> torch.Tensor:
        half = max(1, token_ids.shape[1] // 2)
        first = self._model(input_ids=token_ids[:, :half], use_cache=True)
        if half == token_ids.shape[1]:
            return torch.as_tensor(first.logits)
        second = self._model(input_ids=token_ids[:, half:], cache=first.cache, use_cache=True)
        return torch.cat([first.logits, second.logits], dim=1)
