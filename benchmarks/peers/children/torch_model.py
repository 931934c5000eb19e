"""transformers on torch: `torch_model.py FOLDER THREADS float32|bfloat16`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from loop import serve
from transformers import AutoModelForCausalLM, DynamicCache


class Model:
    """The checkpoint as `generate` runs it, logits for the last token only."""

    kept_ids = None

    def __init__(self, folder: str, threads: int, dtype: str) -> None:
        torch.set_num_threads(threads)
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
        self._model.eval()
        self._cache = DynamicCache()

    def reset(self, capacity: int) -> None:
        """See `loop.Model`."""
        del capacity
        self._cache = DynamicCache()

    def feed(self, token_ids: Sequence[int]) -> np.ndarray[Any, Any]:
        """See `loop.Model`."""
        with torch.inference_mode():
            found = self._model(
                input_ids=torch.tensor([list(token_ids)]),
                past_key_values=self._cache,
                use_cache=True,
                logits_to_keep=1,
            )
        return found.logits[0, -1].float().numpy()


if __name__ == "__main__":
    serve(lambda: Model(sys.argv[1], int(sys.argv[2]), sys.argv[3]))
