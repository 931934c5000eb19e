"""ONNX Runtime GenAI, a folder of its own builder: `genai.py FOLDER THREADS`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnxruntime_genai as og
from loop import serve


class Model:
    """Its generator, fed tokens; buffers as its configuration has them."""

    kept_ids = None

    def __init__(self, folder: str, threads: int) -> None:
        config = og.Config(folder)
        options = {"intra_op_num_threads": threads}
        config.overlay(json.dumps({"model": {"decoder": {"session_options": options}}}))
        self._model = og.Model(config)
        self._generator: Any = None

    def reset(self, capacity: int) -> None:
        """See `loop.Model`."""
        parameters = og.GeneratorParams(self._model)
        parameters.set_search_options(max_length=capacity, do_sample=False)
        self._generator = og.Generator(self._model, parameters)

    def feed(self, token_ids: Sequence[int]) -> np.ndarray[Any, Any]:
        """See `loop.Model`."""
        self._generator.append_tokens(np.array([token_ids], np.int32))
        return np.asarray(self._generator.get_logits()).reshape(-1)


if __name__ == "__main__":
    serve(lambda: Model(sys.argv[1], int(sys.argv[2])))
