"""Facts of a PyTorch model as it runs; part of the reference's process."""

from __future__ import annotations

from typing import Any

import torch

from headport.export.checkpoint import Checkpoint, checkpoint_sha256
from headport.validate.report import ReferenceFacts

__all__ = ["reference_facts"]


def reference_facts(
    checkpoint: Checkpoint, model: Any, tokenizer: Any, vocab_size: int
) -> ReferenceFacts:
    """Facts of a loaded model.

    Args:
        checkpoint: Where it comes from.
        model: A transformers model.
        tokenizer: Its own.
        vocab_size: Width of its logits, or rows of its embedding.
    """
    import tokenizers
    import transformers

    return ReferenceFacts(
        checkpoint=checkpoint.name,
        format=checkpoint.format,
        sha256=checkpoint_sha256(checkpoint),
        model=type(model).__name__,
        dtype=str(next(model.parameters()).dtype).removeprefix("torch."),
        parameters=sum(p.numel() for p in model.parameters()),
        attention=str(model.config._attn_implementation),
        tokenizer=type(tokenizer).__name__,
        vocab_size=vocab_size,
        threads=torch.get_num_threads(),
        versions={
            "torch": str(torch.__version__),
            "transformers": str(transformers.__version__),
            "tokenizers": str(tokenizers.__version__),
        },
    )
