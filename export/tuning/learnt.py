"""Tokens that PEFT trained to stand before every prompt, held against the model they are for.

Prefix tuning (Li & Liang 2021, arXiv:2101.00190) learns the keys and values of P tokens in every
layer; prompt tuning (Lester et al. 2021, arXiv:2104.08691) and P-tuning (Liu et al. 2021,
arXiv:2103.10385) learn the embeddings of P tokens, which the model then reads like any other. Of
both kinds a sequence sees nothing but what stands in the caches before it begins. PEFT saves one
tensor, `prompt_embeddings`: what an encoder or a projection made of its own weights, these folded.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch

from headport.errors import CheckpointError, ExportError
from headport.export.checkpoint import run_reference, some_names
from headport.export.tuning.files import AdapterFiles, AdapterName
from headport.export.tuning.learnt_config import PREFIX, read_learnt_config

__all__ = ["KeysAndValues", "LearntTokens", "cache_argument", "find_learnt"]

KeysAndValues = list[tuple[torch.Tensor, torch.Tensor]]  # of each layer, [KV heads, P, D]

_TENSOR = "prompt_embeddings"
_EMBEDDINGS = "inputs_embeds"


@dataclass(frozen=True)
class LearntTokens(AdapterName):
    """Learnt tokens that fit their model."""

    kind: str  # as PEFT names it
    tokens: int  # P
    embeddings: torch.Tensor | None  # [P, H], what the model reads; None of a prefix
    layers: KeysAndValues  # what they leave in the caches, as it is written
    trained: KeysAndValues  # the same as PyTorch is given it; of a prefix laid out as PEFT does it

    def facts(self, checkpoint_sha256: str) -> dict[str, Any]:
        """For the manifest: which adapter, and what it puts before every prompt."""
        return {
            "name": self.name,
            "sha256": self.sha256,
            "checkpoint_sha256": checkpoint_sha256,
            "type": self.kind,
            "tokens": self.tokens,
        }


def find_learnt(files: AdapterFiles, model: Any) -> LearntTokens:
    """Hold learnt tokens against a model, and find what they leave in its caches.

    Args:
        files: Of one of the kinds of `learnt_config.LEARNT`.
        model: A causal language model in float32.

    Raises:
        CheckpointError: If the tensor is missing or is for another model.
        ExportError: If the adapter asks for what is not done here, or the model keeps something
            else than keys and values.
    """
    tokens, kind = read_learnt_config(files), str(files.config["peft_type"])
    saved = _only_tensor(files)
    sizes = _cached_sizes(files, model)
    if kind == PREFIX:
        _check_size(files, model, saved, *_prefix_sizes(files, model, sizes, tokens))
        parts = _split(saved, *sizes[0]), _as_peft(saved, *sizes[0])
        return LearntTokens(files.name, files.sha256, kind, tokens, None, *parts)
    _check_size(files, model, saved, [tokens, _embedding_size(files, model)])
    layers = _read(files, model, saved)
    return LearntTokens(files.name, files.sha256, kind, tokens, saved, layers, layers)


def _only_tensor(files: AdapterFiles) -> torch.Tensor:
    if _TENSOR not in files.tensors:
        raise CheckpointError(
            f"{files.name}: one tensor {_TENSOR} was expected, as PEFT saves it, none is there; "
            "save it again"
        )
    if other := sorted(files.tensors.keys() - {_TENSOR}):
        raise ExportError(
            f"{files.name}: one tensor {_TENSOR} was expected, besides it were found "
            f"{', '.join(some_names(other))}; train learnt tokens alone"
        )
    return files.tensors[_TENSOR]


def _check_size(
    files: AdapterFiles,
    model: Any,
    saved: torch.Tensor,
    expected: list[int],
    heads: int | None = None,
) -> None:
    declared = files.config.get("num_attention_heads") or heads
    if list(saved.shape) == expected and heads in (None, declared):
        return
    own, its = ("", "") if heads is None else (f" in {heads} heads", f" in {declared}")
    raise CheckpointError(
        f"{files.name}: the adapter is for another model ({files.base}): {type(model).__name__} "
        f"needs {_TENSOR} {expected}{own}, the adapter has {list(saved.shape)}{its}; export the "
        "checkpoint that it was trained on"
    )


def _prefix_sizes(
    files: AdapterFiles, model: Any, sizes: list[tuple[int, int]], tokens: int
) -> tuple[list[int], int]:
    # What the tensor of a prefix must be, and KV heads.
    if len(set(sizes)) != 1:
        raise ExportError(
            f"{files.name}: a prefix has one size for all layers, those of {type(model).__name__} "
            f"cache {sorted(set(sizes))} (heads, size); use prompt tuning"
        )
    heads, size = sizes[0]
    return [tokens, 2 * len(sizes) * heads * size], heads


def _split(saved: torch.Tensor, heads: int, size: int) -> KeysAndValues:
    # Columns of a token: key of layer 0, value of layer 0, key of layer 1, …; heads side by side.
    columns = torch.split(saved, heads * size, dim=1)
    parts = [each.reshape(-1, heads, size).transpose(0, 1).contiguous() for each in columns]
    return list(zip(parts[0::2], parts[1::2], strict=True))


def _as_peft(saved: torch.Tensor, heads: int, size: int) -> KeysAndValues:
    # What PEFT's get_prompt makes of the tensor: [2, heads, P, size] of each layer.
    whole = saved.view(1, len(saved), -1, heads, size).permute(2, 0, 3, 1, 4)
    return [(each[0, 0], each[1, 0]) for each in torch.split(whole, 2)]


def _read(files: AdapterFiles, model: Any, embeddings: torch.Tensor) -> KeysAndValues:
    from transformers import DynamicCache

    # Without a configuration no layer drops what is beyond its window.
    cache = DynamicCache()
    arguments = {_EMBEDDINGS: embeddings[None], cache_argument(model): cache, "use_cache": True}
    run_reference(model, **arguments)
    layers = [(layer.keys[0], layer.values[0]) for layer in cache.layers]
    if not all(torch.isfinite(part).all() for pair in layers for part in pair):
        raise CheckpointError(
            f"{files.name}: {type(model).__name__} makes NaN or infinity of its tokens; train it "
            "again"
        )
    return layers


def cache_argument(model: Any) -> str:
    """How a model's forward calls its cache.

    Raises:
        ExportError: If it takes none of transformers' kind.
    """
    for name in ("cache", "past_key_values"):
        if name in inspect.signature(model.forward).parameters:
            return name
    raise ExportError(
        f"{type(model).__name__}: its forward takes no cache of transformers' kind, which learnt "
        "tokens are put into; export it without an adapter"
    )


def _cached_sizes(files: AdapterFiles, model: Any) -> list[tuple[int, int]]:
    """KV heads and size of each layer's keys and values."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    arguments = {cache_argument(model): cache, "use_cache": True}
    run_reference(model, input_ids=torch.zeros((1, 2), dtype=torch.int64), **arguments)
    sizes = []
    for index, layer in enumerate(cache.layers):
        key: Any = getattr(layer, "keys", None)
        value: Any = getattr(layer, "values", None)
        plain = isinstance(key, torch.Tensor) and isinstance(value, torch.Tensor)
        if not plain or key.shape != value.shape or hasattr(layer, "recurrent_states"):
            raise ExportError(
                f"{files.name}: learnt tokens are put before layers that keep keys and values of "
                f"one size, layer {index} of {type(model).__name__} keeps something else; export "
                "it without an adapter"
            )
        sizes.append((int(key.shape[1]), int(key.shape[3])))
    return sizes


def _embedding_size(files: AdapterFiles, model: Any) -> int:
    if _EMBEDDINGS not in inspect.signature(model.forward).parameters:
        raise ExportError(
            f"{files.name}: {type(model).__name__} reads token ids alone, no embeddings "
            f"({_EMBEDDINGS}); export it without an adapter"
        )
    return int(model.get_input_embeddings().weight.shape[1])
