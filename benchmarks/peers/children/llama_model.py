"""llama.cpp, a GGUF file: `llama_model.py FILE THREADS auto|on|off`, the last one flash attention.

Not named after its package, which would be looked up beside this file first.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from typing import Any

import llama_cpp
import numpy as np
from loop import serve

_FLASH_ATTENTION = {"auto": -1, "off": 0, "on": 1}  # enum llama_flash_attn_type
_CHUNK = 512  # its default for tokens computed at once


class Model:
    """A context per sequence, its memory kept while the capacity is the same."""

    kept_ids = None

    def __init__(self, file: str, threads: int, flash_attention: str) -> None:
        llama_cpp.llama_backend_init()
        # Memory mapping is left on, as it is by default; matrices that are stored in another order
        # for this processor are copied all the same.
        loaded = llama_cpp.llama_model_default_params()
        self._model = llama_cpp.llama_model_load_from_file(file.encode(), loaded)
        if not self._model:
            raise SystemExit(f"{file}: llama.cpp cannot load it")
        vocabulary = llama_cpp.llama_model_get_vocab(self._model)
        self._size = llama_cpp.llama_vocab_n_tokens(vocabulary)
        self._threads = threads
        self._flash_attention = _FLASH_ATTENTION[flash_attention]
        self._context: Any = None
        self._capacity = 0

    def reset(self, capacity: int) -> None:
        """See `loop.Model`."""
        if capacity != self._capacity:
            if self._context is not None:
                llama_cpp.llama_free(self._context)
            options = llama_cpp.llama_context_default_params()
            options.n_ctx, options.n_batch, options.n_ubatch = capacity, _CHUNK, _CHUNK
            options.n_threads = options.n_threads_batch = self._threads
            options.flash_attn_type = self._flash_attention
            self._context = llama_cpp.llama_init_from_model(self._model, options)
            self._capacity = capacity
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), False)

    def feed(self, token_ids: Sequence[int]) -> np.ndarray[Any, Any]:
        """See `loop.Model`. Logits are computed for the last token only, its default."""
        for start in range(0, len(token_ids), _CHUNK):
            ids = token_ids[start : start + _CHUNK]
            held = (ctypes.c_int32 * len(ids))(*ids)
            batch = llama_cpp.llama_batch_get_one(held, len(ids))
            if llama_cpp.llama_decode(self._context, batch):
                raise SystemExit(f"llama.cpp could not run {len(ids)} tokens")
        logits = llama_cpp.llama_get_logits_ith(self._context, -1)
        return np.ctypeslib.as_array(logits, (self._size,)).copy()


if __name__ == "__main__":
    serve(lambda: Model(sys.argv[1], int(sys.argv[2]), sys.argv[3]))
