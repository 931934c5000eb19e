"""Heads as PyTorch modules: trained on a model's hidden states, saved, exported with the model.

H is the model's hidden size, N any number of hidden states (those its LM head is given, that is
after the final norm), V the size of the vocabulary. `torch.nn.AdaptiveLogSoftmaxWithLoss` is the
fifth of them and stays what it is. Imports torch only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional

from headport.errors import UsageError

__all__ = ["ACTIVATIONS", "MultiTaskHead", "TreeSoftmax", "ValueHead", "VocabularyHead"]

Pooling = Literal["none", "last"]

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": functional.relu,
    "gelu": functional.gelu,
    "silu": functional.silu,
    "tanh": torch.tanh,
    "none": lambda x: x,
}


class _Shared(nn.Module):
    """[..., H] → [..., inner]: a linear layer and an activation."""

    def __init__(self, hidden_size: int, inner_size: int, activation: str) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise UsageError(f"activation {activation!r}: use one of {', '.join(ACTIVATIONS)}")
        self.linear = nn.Linear(hidden_size, inner_size)
        self.activation = activation

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return ACTIVATIONS[self.activation](self.linear(hidden_states))


class ValueHead(nn.Module):
    """A scalar per hidden state: hidden states [..., H] → values [...].

    Args:
        hidden_size: H.
        inner_size: Width of a layer before the last one; 0 for none.
        activation: Of that layer: relu, gelu, silu, tanh or none.
        pooling: `none`: a value per position; `last`: one per text, at its last token.
        pad_id: `last`: the token that counts as padding at the end of a text; None: no token does.
        bias: Of the last layer.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        inner_size: int = 0,
        activation: str = "relu",
        pooling: Pooling = "none",
        pad_id: int | None = None,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.config: dict[str, Any] = {
            "activation": activation,
            "pooling": pooling,
            "pad_id": pad_id,
        }
        self.inner = _Shared(hidden_size, inner_size, activation) if inner_size else None
        self.summary = nn.Linear(inner_size or hidden_size, 1, bias=bias)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        states = hidden_states if self.inner is None else self.inner(hidden_states)
        values: torch.Tensor = self.summary(states)
        return values.squeeze(-1)


class MultiTaskHead(nn.Module):
    """Named tasks behind one shared layer.

    Args:
        hidden_size: H.
        tasks: Name → labels of its scores, or how many scores it has.
        inner_size: Width of the shared layer; 0 for none.
        activation: Of the shared layer: relu, gelu, silu, tanh or none.
        pooling: `last`: scores per text, at its last token; `none`: scores per position.
        pad_id: `last`: the token that counts as padding at the end of a text; None: no token does.
    """

    def __init__(
        self,
        hidden_size: int,
        tasks: Mapping[str, Sequence[str] | int],
        *,
        inner_size: int = 0,
        activation: str = "relu",
        pooling: Pooling = "last",
        pad_id: int | None = None,
    ) -> None:
        super().__init__()
        labels = {
            name: [str(n) for n in range(each)] if isinstance(each, int) else [*each]
            for name, each in tasks.items()
        }
        self.config: dict[str, Any] = {
            "tasks": labels,
            "activation": activation,
            "pooling": pooling,
            "pad_id": pad_id,
        }
        self.shared = _Shared(hidden_size, inner_size, activation) if inner_size else None
        width = inner_size or hidden_size
        self.tasks = nn.ModuleDict({n: nn.Linear(width, len(each)) for n, each in labels.items()})

    def forward(self, hidden_states: torch.Tensor, tasks: Sequence[str]) -> list[torch.Tensor]:
        """Hidden states [N, H] and a task for each → scores [n] of each one's task."""
        return [self.scores(h[None], task)[0] for h, task in zip(hidden_states, tasks, strict=True)]

    def scores(self, hidden_states: torch.Tensor, task: str) -> torch.Tensor:
        """Scores of one task: hidden states [..., H] → [..., n]."""
        states = hidden_states if self.shared is None else self.shared(hidden_states)
        found: torch.Tensor = self.tasks[task](states)
        return found


class VocabularyHead(nn.Module):
    """One more head over the vocabulary: hidden states [..., H] → logits [..., V].

    With `blocks`, h ← h + silu(A h + a) comes that many times first, as in heads that predict
    tokens further ahead. Source: Cai et al. 2024, "Medusa", arXiv:2401.10774.

    Args:
        hidden_size: H.
        vocab_size: V.
        blocks: Residual blocks before the matrix; 0 for none.
        bias: Of the matrix.
    """

    def __init__(
        self, hidden_size: int, vocab_size: int, *, blocks: int = 0, bias: bool = False
    ) -> None:
        super().__init__()
        self.config: dict[str, Any] = {}
        self.blocks = nn.ModuleList(nn.Linear(hidden_size, hidden_size) for _ in range(blocks))
        self.output = nn.Linear(hidden_size, vocab_size, bias=bias)

    def states(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """What the matrix is given: [..., H] → [..., H]."""
        for block in self.blocks:
            hidden_states = hidden_states + functional.silu(block(hidden_states))
        return hidden_states

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.output(self.states(hidden_states))
        return found


class TreeSoftmax(nn.Module):
    """Softmax over classes, then over the tokens of a class: p(t) = p(class of t) p(t | its class).

    Source: Goodman 2001, arXiv:cs/0108006; Morin and Bengio 2005 for deeper trees.

    Args:
        hidden_size: H.
        class_of: Class of each token, [V]; every class from 0 on has at least one token.

    Raises:
        UsageError: If a class is empty, or there is no token.
    """

    order: torch.Tensor  # [V], token of each row of `members`
    sizes: torch.Tensor  # [C], tokens per class

    def __init__(self, hidden_size: int, class_of: Sequence[int] | torch.Tensor) -> None:
        super().__init__()
        classes = torch.as_tensor(class_of, dtype=torch.int64).reshape(-1)
        if not len(classes) or int(classes.min()) < 0:
            raise UsageError("class_of: one class from 0 on per token was expected")
        sizes = torch.bincount(classes)
        if empty := (sizes == 0).nonzero().flatten().tolist():
            raise UsageError(f"class_of: classes {empty} have no token; number them without gaps")
        self.config: dict[str, Any] = {}
        self.register_buffer("order", classes.argsort(stable=True))
        self.register_buffer("sizes", sizes)
        self.classes = nn.Linear(hidden_size, len(sizes))
        self.members = nn.Linear(hidden_size, len(classes), bias=False)  # row r: token order[r]

    def log_prob(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Log-probabilities of all tokens, [N, H] → [N, V]."""
        shares = functional.log_softmax(self.classes(hidden_states), dim=-1)
        parts = self.members(hidden_states).split(self.sizes.tolist(), dim=-1)
        inner = [
            functional.log_softmax(part, dim=-1) + shares[:, n, None]
            for n, part in enumerate(parts)
        ]
        found = torch.empty_like(torch.cat(inner, dim=-1))
        found[:, self.order] = torch.cat(inner, dim=-1)
        return found

    def predict(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The most likely token of each row, [N, H] → [N]."""
        return self.log_prob(hidden_states).argmax(dim=-1)

    def forward(self, hidden_states: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Mean negative log-likelihood of target tokens [N]; scores the targets' classes only."""
        ends = self.sizes.cumsum(0)
        row_of = torch.empty_like(self.order)
        row_of[self.order] = torch.arange(len(self.order), device=self.order.device)
        rows = row_of[target]
        classes = torch.searchsorted(ends, rows, right=True)
        shares = functional.log_softmax(self.classes(hidden_states), dim=-1)
        loss = -shares.gather(1, classes[:, None]).sum()
        for each in sorted(set(classes.tolist())):
            chosen = classes == each
            last, count = int(ends[each]), int(self.sizes[each])
            weight = self.members.weight[last - count : last]
            scores = functional.log_softmax(hidden_states[chosen] @ weight.T, dim=-1)
            loss = loss - scores.gather(1, (rows[chosen] - (last - count))[:, None]).sum()
        return loss / len(target)
