"""Ways to let a PyTorch model begin with learnt tokens: in its cache, or read as they were trained.

Imports torch and transformers only, so that the validating process can use it too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from headport.export.tuning.learnt import KeysAndValues, cache_argument

__all__ = ["begin_with", "read_before"]


def begin_with(model: Any, layers: KeysAndValues) -> Any:
    """Let every run of a model that is given no cache begin with keys and values.

    Args:
        model: A causal language model, always called with names of arguments.
        layers: Of each layer, [KV heads, P, D].

    Returns:
        The hook; `remove` ends it.
    """
    from transformers import DynamicCache

    name = cache_argument(model)

    def start(_module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if kwargs.get(name) is not None:
            return None
        read = kwargs["inputs_embeds"] if kwargs.get("input_ids") is None else kwargs["input_ids"]
        batch, cache = len(read), DynamicCache()
        for index, pair in enumerate(layers):
            cache.update(*(part.expand(batch, -1, -1, -1) for part in pair), index)
        return args, {**kwargs, name: cache, "use_cache": True}

    return model.register_forward_pre_hook(start, with_kwargs=True)


@contextmanager
def read_before(model: Any, embeddings: torch.Tensor) -> Iterator[None]:
    """Let a model read embeddings [P, H] before its tokens, all in one run and without a cache.

    What it answers is cut to its own tokens.
    """
    first = len(embeddings)

    def join(_module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        given = dict(kwargs)
        ids, own = given.pop("input_ids", None), given.get("inputs_embeds")
        own = model.get_input_embeddings()(ids) if own is None else own
        before = embeddings.to(own.dtype).expand(len(own), -1, -1)
        given["inputs_embeds"] = torch.cat([before, own], dim=1)
        if _chosen(given):
            given["logits_to_keep"] = given["logits_to_keep"] + first
        return args, given

    def cut(_module: Any, _args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        if not _chosen(kwargs):
            output.logits = output.logits[:, first:]
        if getattr(output, "hidden_states", None):
            output.hidden_states = tuple(states[:, first:] for states in output.hidden_states)
        return output

    hooks = [
        model.register_forward_pre_hook(join, with_kwargs=True),
        model.register_forward_hook(cut, with_kwargs=True),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _chosen(arguments: dict[str, Any]) -> bool:
    # Positions whose logits alone are asked for.
    return isinstance(arguments.get("logits_to_keep"), torch.Tensor)
