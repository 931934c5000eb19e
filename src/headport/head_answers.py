"""What a head that is not of a vocabulary answers, by the kind of head: one row each.

Parity after export and the self-test compare these, so that what is compared is what is shipped.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from headport.bundle import Bundle
from headport.clustered import open_clusters
from headport.manifest import AdaptiveHead, TasksHead, TreeHead, ValueHead

__all__ = ["answer", "task_scores"]

Float32 = npt.NDArray[np.float32]
Int64 = npt.NDArray[np.int64]
Answers = dict[str, npt.NDArray[np.floating]]


class _Heads(Protocol):
    """What is asked of a runner."""

    def full_logits(self, hidden_states: Float32, name: str = "lm") -> Float32: ...

    def rows(self, hidden_states: Float32, token_ids: Int64, name: str = "lm") -> Float32: ...


def answer(bundle: Bundle, runner: _Heads, name: str, hidden_states: Float32) -> Answers:
    """All that one head says about hidden states [N, H].

    Returns:
        value: `values` [N]; tasks: the scores of each task by its name, [N, n]; adaptive and tree:
        `log_probs` [N, V].
    """
    match bundle.manifest.task_heads[name]:
        case ValueHead():
            return {"values": runner.full_logits(hidden_states, name)[:, 0]}
        case TasksHead() as head:
            return {task: task_scores(runner, name, task, hidden_states) for task in head.tasks}
        case AdaptiveHead() | TreeHead() as head:
            softmax = open_clusters(bundle, runner, name, head)
            return {"log_probs": softmax.log_probs(hidden_states)}


def task_scores(runner: _Heads, name: str, task: str, hidden_states: Float32) -> Float32:
    """Scores of one task of a head, [N, n]."""
    return runner.full_logits(hidden_states, f"{name}.{task}")
