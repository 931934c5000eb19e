"""Optimum on ONNX Runtime, a folder of its own exporter.

`optimum_model.py FOLDER THREADS bound|unbound`: bound uses I/O binding, which is off by default.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnxruntime
import torch
from loop import serve
from optimum.onnxruntime import ORTModelForCausalLM


class Model:
    """Its model class, which returns caches that are one token longer."""

    kept_ids = None

    def __init__(self, folder: str, threads: int, binding: str) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        self._model = ORTModelForCausalLM.from_pretrained(
            folder, session_options=options, use_io_binding=binding == "bound"
        )
        self._past: Any = None
        self._fed = 0

    def reset(self, capacity: int) -> None:
        """See `loop.Model`."""
        del capacity
        self._past, self._fed = None, 0

    def feed(self, token_ids: Sequence[int]) -> np.ndarray[Any, Any]:
        """See `loop.Model`."""
        end = self._fed + len(token_ids)
        found = self._model(
            input_ids=torch.tensor([list(token_ids)]),
            attention_mask=torch.ones((1, end), dtype=torch.int64),
            position_ids=torch.arange(self._fed, end)[None],
            past_key_values=self._past,
            use_cache=True,
        )
        self._past, self._fed = found.past_key_values, end
        return found.logits[0, -1].numpy()


if __name__ == "__main__":
    serve(lambda: Model(sys.argv[1], int(sys.argv[2]), sys.argv[3]))
