"""A loaded model in half precision, and how many bytes its weights take."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from headport.export.deferred import DeferredTensor, recording, replace_deferred
from headport.export.head import HeadTransform

__all__ = ["convert_model", "parameter_bytes"]


def convert_model(
    model: Any, head: HeadTransform, dtype: torch.dtype, *, keep_wide: bool = False
) -> HeadTransform:
    """Convert a model's weights in place; returns its head with the converted weight.

    What the model computes for itself, such as rotary frequencies, stays in float32, as it does
    when transformers loads a checkpoint in half precision; so does a bias, which is small.

    Args:
        model: The model.
        head: Its head.
        dtype: Of the weights from now on.
        keep_wide: Leave modules in float32 that the model says overflow in half precision.
    """
    wide = set(getattr(model, "_keep_in_fp32_modules", None) or ()) if keep_wide else set()
    with recording():
        replace_deferred(model, lambda weight: weight.to(dtype))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if isinstance(parameter, DeferredTensor) or wide & set(name.split(".")):
                continue
            parameter.data = parameter.data.to(dtype)
        for module in model.modules():
            # A buffer may be a view of another tensor, so it is replaced, not changed.
            for name, buffer in module._buffers.items():
                computed = buffer is None or name in module._non_persistent_buffers_set
                if not computed and buffer.is_floating_point():
                    module._buffers[name] = buffer.to(dtype)
    model.config.dtype = dtype
    return replace(head, weight=model.get_output_embeddings().weight.detach())


def parameter_bytes(model: Any, head: HeadTransform) -> int:
    """Bytes of the model's parameters, each storage once, and equal head and embedding once."""
    unique = {id(p): p.numel() * p.element_size() for p in model.parameters()}
    output, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    if head.tied and output is not embedding:
        del unique[id(output)]
    return sum(unique.values())
