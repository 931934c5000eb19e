"""Heads with random weights, and one bundle that holds one of each kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

HIDDEN, VOCAB = 64, 257
TASKS = {"mood": ["bad", "good"], "topic": ["a", "b", "c"], "toxic": 1}
CUTOFFS = [40, 120]


def randomise(module: Any, seed: int) -> Any:
    """Weights large enough that every part of a head shows in its answers."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return module.eval()


def adaptive_head() -> Any:
    """An adaptive softmax whose tail clusters often hold the likeliest token."""
    import torch

    made = torch.nn.AdaptiveLogSoftmaxWithLoss(HIDDEN, VOCAB, CUTOFFS, 2.0, head_bias=True)
    randomise(made, 4)
    with torch.no_grad():
        made.head.bias[CUTOFFS[0] :] += 5
    return made


def head_modules() -> dict[str, Any]:
    """One head of each kind, on hidden states of 64 values and 257 tokens."""
    import torch

    from headport.export.heads import MultiTaskHead, TreeSoftmax, ValueHead, VocabularyHead

    generator = torch.Generator().manual_seed(9)
    class_of = torch.randint(0, 11, (VOCAB,), generator=generator)
    return {
        "reward": randomise(ValueHead(HIDDEN, inner_size=24, activation="gelu"), 1),
        "judge": randomise(MultiTaskHead(HIDDEN, TASKS, inner_size=32, activation="tanh"), 2),
        "later": randomise(VocabularyHead(HIDDEN, VOCAB, blocks=2), 3),
        "frequent": adaptive_head(),
        "tree": randomise(TreeSoftmax(HIDDEN, class_of), 5),
    }


def save_modules(folder: Path, modules: dict[str, Any]) -> list[str]:
    """Save heads; returns them as `--head` takes them."""
    from headport.export.heads import save_head

    found = []
    for name, module in modules.items():
        file = folder / f"{name}.safetensors"
        save_head(module, file)
        found.append(f"{name}={file}")
    return found
