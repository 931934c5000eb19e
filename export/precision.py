"""A loaded model in half precision, and how many bytes its weights take."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from headport.export.deferred import DeferredTensor, recording, replace_deferred
from headport.export.head import HeadTransform

__all__ = ["convert_model", "parameter_bytes"]


def convert_model(model: Any, head: HeadTransform, dtype: torch.dtype) -> HeadTransform:
    """Convert a model's weights in place; returns its head with the converted weight.

    What the model computes for itself, such as rotary frequencies, stays in float32, as it does
    when transformers loads a checkpoint in half precision; so does a bias, which is small.
    """
    computed = {
        f"{prefix}.{name}".removeprefix(".")
        for prefix, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    }
    with recording():
        replace_deferred(model, lambda weight: weight.to(dtype))
    with torch.no_grad():
        for parameter in model.parameters():
            if isinstance(parameter, DeferredTensor):
                continue
            parameter.data = parameter.data.to(dtype)
        for name, buffer in model.named_buffers():
            if name not in computed and buffer.is_floating_point():
                buffer.data = buffer.data.to(dtype)
    model.config.dtype = dtype
    return replace(head, weight=model.get_output_embeddings().weight.detach())


def parameter_bytes(model: Any, head: HeadTransform) -> int:
    """Bytes of the model's parameters, each storage once, and equal head and embedding once."""
    unique = {id(p): p.numel() * p.element_size() for p in model.parameters()}
    output, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    if head.tied and output is not embedding:
        del unique[id(output)]
    return sum(unique.values())
