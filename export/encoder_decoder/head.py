"""The head of an encoder-decoder model: all that follows the decoder, measured.

Scales before the matrix (T5) and biases after it (`final_logits_bias`) are found like those of any
head, by what it answers; see `headport.export.head`.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.modeling_outputs import BaseModelOutput, BaseModelOutputWithPastAndCrossAttentions

from headport.errors import ExportError
from headport.export.checkpoint import run_reference
from headport.export.encoder_decoder.families import Family
from headport.export.encoder_decoder.trace import example_inputs
from headport.export.head import HeadTransform, fit_head, is_same

__all__ = ["probe_decoder_head"]

_ROWS = 8


def probe_decoder_head(model: Any, family: Family) -> HeadTransform:
    """Find the head, given hidden states in place of what the decoder gives.

    Args:
        model: A float32 transformers model.
        family: What it reads.

    Raises:
        ExportError: If there is no single output matrix, or it does not explain the logits.
    """
    name = type(model).__name__
    weight = getattr(model.get_output_embeddings(), "weight", None)
    if not isinstance(weight, torch.Tensor) or weight.dim() != 2:
        raise ExportError(f"{name}: one output matrix was expected, none found")
    decoder = model.get_decoder()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, weight.shape[0], (1, _ROWS), generator=generator)
    source = example_inputs(model, family, 1, 3)
    states = run_reference(model.get_encoder(), **source).last_hidden_state
    hidden = run_reference(decoder, input_ids=ids, encoder_hidden_states=states).last_hidden_state

    def logits_of(rows: torch.Tensor) -> torch.Tensor:
        given = BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=rows[None])
        decoder.forward = lambda *_args, **_kwargs: given
        try:
            tokens = torch.zeros((1, len(rows)), dtype=torch.int64)
            outputs = BaseModelOutput(last_hidden_state=states)
            answer = run_reference(model, encoder_outputs=outputs, decoder_input_ids=tokens)
        finally:
            del decoder.__dict__["forward"]
        found: torch.Tensor = answer.logits[0]
        return found

    names = {id(p): n for n, p in model.named_parameters()}
    scale, softcap, bias = fit_head(logits_of, weight.detach(), None, hidden[0], name)
    return HeadTransform(
        weight=weight.detach(),
        weight_name=names.get(id(weight), "lm_head.weight"),
        bias=bias,
        scale=scale,
        softcap=softcap,
        tied=is_same(weight, decoder.get_input_embeddings().weight),
    )
