"""Parity of the heads beside the LM head: what the written files answer, against PyTorch.

Each head is given the hidden states that the written backbone makes in every way it can be run, so
its error holds all that lies between token ids and its answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from headport.bundle import Bundle
from headport.errors import ExportError, ParityError
from headport.export.checkpoint import run_reference
from headport.head_answers import answer
from headport.heads import HeadMethods

__all__ = [
    "HeadParity",
    "HeadReference",
    "check_heads",
    "compare_heads",
    "hidden_states",
    "measure_heads",
    "reference_heads",
]

Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]
_Answers = Mapping[str, npt.NDArray[Any]]
_Measured = list[tuple[str, float, int, float]]

_LARGEST_SUM_ERROR = 1e-6  # of a distribution's probabilities
_LEAST = 1e-6  # what is smaller everywhere is judged as if it were this large


@dataclass(frozen=True)
class HeadReference:
    """What PyTorch says one head answers."""

    name: str
    answers: tuple[_Answers, ...]  # per row of the plan, at its scored positions

    @property
    def largest(self) -> float:
        """The largest magnitude among all of it."""
        return max(float(np.abs(a).max()) for row in self.answers for a in row.values())


@dataclass(frozen=True)
class HeadParity:
    """How far one head's written files are from PyTorch, in the head's own units."""

    cases: dict[str, float]  # way to run the bundle → largest |Δ|
    limit: float
    largest: float  # magnitude of the reference's answers
    same_choice: float | None  # share of positions with the same best score; None for one scalar
    sum_error: float | None  # of distributions, the largest |Σ p − 1|

    def __bool__(self) -> bool:
        return (
            bool(self.cases)
            and all(error <= self.limit for error in self.cases.values())
            and (self.sum_error or 0.0) <= _LARGEST_SUM_ERROR
        )


@torch.no_grad()
def hidden_states(model: Any, token_ids: Int64) -> torch.Tensor:
    """The last hidden states of one row as transformers gives them, [n, H] float32.

    A model of the user's own gives none; there it is what its head is given.
    """
    seen: list[torch.Tensor] = []
    hook = model.get_output_embeddings().register_forward_pre_hook(
        lambda _module, inputs: seen.append(inputs[0])
    )
    arguments = {"output_hidden_states": True} if hasattr(model, "base_model_prefix") else {}
    try:
        found = run_reference(
            model, input_ids=torch.from_numpy(token_ids)[None], use_cache=False, **arguments
        )
    finally:
        hook.remove()
    states = getattr(found, "hidden_states", None)
    last: torch.Tensor = states[-1] if states else seen[0]
    return last[0].float()


@torch.no_grad()
def reference_heads(
    model: Any,
    rows: Sequence[tuple[Int64, Int64]],
    heads: Mapping[str, Callable[[torch.Tensor], Mapping[str, torch.Tensor]]],
) -> list[HeadReference]:
    """What PyTorch says heads answer.

    Args:
        model: The untouched model.
        rows: Token ids [n] and scored positions of each.
        heads: By name, hidden states [N, H] → answers.
    """
    if not heads:
        return []
    states = [hidden_states(model, ids)[torch.from_numpy(scored)] for ids, scored in rows]
    found = []
    for name, head in heads.items():
        answers = tuple({k: v.numpy() for k, v in head(h).items()} for h in states)
        if not all(np.isfinite(a).all() for row in answers for a in row.values()):
            raise ExportError(f"head {name}: PyTorch itself answers NaN or infinity")
        found.append(HeadReference(name, answers))
    return found


def measure_heads(
    bundle: Bundle,
    runner: HeadMethods,
    references: Sequence[HeadReference],
    states: Sequence[Float32],
) -> _Measured:
    """Hold what heads answer on hidden states, per row at its scored positions, against PyTorch.

    Returns:
        Head, largest |Δ|, positions with the same best score (-1: one scalar), and the largest
        |Σ p − 1| (-1: no distribution), per row.
    """
    found: _Measured = []
    for reference in references:
        for expected, rows in zip(reference.answers, states, strict=True):
            answers = _answers(bundle, runner, reference.name, rows)
            found.append((reference.name, *_difference(answers, expected)))
    return found


def _answers(bundle: Bundle, runner: HeadMethods, name: str, rows: Float32) -> _Answers:
    if name in bundle.manifest.heads:
        return {"logits": runner.full_logits(rows, name)}
    return answer(bundle, runner, name, rows)


def _difference(found: _Answers, expected: _Answers) -> tuple[float, int, float]:
    assert found.keys() == expected.keys(), "references are named as answers are"
    worst, same, sums = 0.0, -1, -1.0
    for key, values in expected.items():
        if found[key].shape != values.shape or not np.isfinite(found[key]).all():
            return np.inf, 0, -1.0
        worst = max(worst, float(np.abs(found[key] - values.astype(np.float64)).max()))
        if values.ndim == 2 and values.shape[1] > 1:
            agreed = int((found[key].argmax(axis=1) == values.argmax(axis=1)).sum())
            same = agreed if same < 0 else min(same, agreed)
        if key == "log_probs":
            sums = max(sums, float(np.abs(np.exp(found[key]).sum(axis=1) - 1).max()))
    return worst, same, sums


def compare_heads(
    references: Sequence[HeadReference], measured: Mapping[str, _Measured], relative: float
) -> dict[str, HeadParity]:
    """The outcome of each head.

    Args:
        references: What PyTorch says.
        measured: Way to run the bundle → what `measure_heads` gave.
        relative: Accepted |Δ| by the largest magnitude of the reference's answers.
    """
    found = {}
    for reference in references:
        own = {case: [m for m in rows if m[0] == reference.name] for case, rows in measured.items()}
        positions = sum(len(next(iter(row.values()))) for row in reference.answers)
        every = [m for rows in own.values() for m in rows]
        choices = [sum(m[2] for m in rows) for rows in own.values()]
        sums = max(m[3] for m in every)
        found[reference.name] = HeadParity(
            cases={case: max(m[1] for m in rows) for case, rows in own.items()},
            limit=relative * max(reference.largest, _LEAST),
            largest=reference.largest,
            same_choice=None if every[0][2] < 0 else min(choices) / positions,
            sum_error=None if sums < 0 else sums,
        )
    return found


def check_heads(parities: Mapping[str, HeadParity]) -> None:
    """Raise `ParityError` for the first head whose files do not answer like PyTorch."""
    for name, parity in parities.items():
        if parity:
            continue
        worst = max(parity.cases, key=lambda case: parity.cases[case])
        if parity.cases[worst] <= parity.limit:
            raise ParityError(
                f"head {name}: its probabilities sum to 1 ± {parity.sum_error:.3g}, "
                f"{_LARGEST_SUM_ERROR:g} is accepted; nothing was written"
            )
        raise ParityError(
            f"head {name}: the written files do not answer like PyTorch: {worst} differs by "
            f"{parity.cases[worst]:.3g}, {parity.limit:.3g} is accepted; nothing was written"
        )
