"""What is run to compare rows of embeddings in prompts with PyTorch's `inputs_embeds`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from headport.export.embedded import ARGUMENT, check_takes_rows
from headport.export.parity import Embedded, ParityPlan, reference_logits

__all__ = ["ask_embedded", "read_rows"]

Float32 = npt.NDArray[np.float32]

_EVERY = 3  # one place of so many holds a row, the first one too


def ask_embedded(model: Any, plan: ParityPlan) -> Embedded:
    """What the untouched model answers where some places of the plan hold rows of embeddings.

    Raises:
        ExportError: If it reads tokens alone.
    """
    check_takes_rows(model)
    mixed, rows = _mixed(model, plan)
    with read_rows(model, rows):
        return Embedded(mixed, rows, reference_logits(model, mixed))


def _mixed(model: Any, plan: ParityPlan) -> tuple[ParityPlan, Float32]:
    # The plan, and the rows [given, E]: random, and as large as those of tokens.
    rng = np.random.Generator(np.random.Philox(key=11))
    ids, count = [], 0
    for row in plan.token_ids:
        mixed = row.copy()
        places = np.arange(0, len(row), _EVERY)
        mixed[places] = -1 - count - np.arange(len(places))
        count += len(places)
        ids.append(mixed)
    with torch.no_grad():
        usual = model.get_input_embeddings()(torch.from_numpy(plan.token_ids[0])[None]).float()
    rows = rng.normal(0.0, float(usual.std()), (count, usual.shape[-1])).astype(np.float32)
    return replace(plan, token_ids=tuple(ids)), rows


@contextmanager
def read_rows(model: Any, rows: Float32) -> Iterator[None]:
    """Let a model read row k wherever it is given the id -1 - k, by its own `inputs_embeds`."""
    values = torch.from_numpy(rows)

    def join(_module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        given = dict(kwargs)
        ids = given.pop("input_ids")
        found = model.get_input_embeddings()(ids.clamp(min=0))
        found[ids < 0] = values[-1 - ids[ids < 0]].to(found.dtype)
        return args, {**given, ARGUMENT: found}

    # Before what an adapter reads in front of a prompt.
    hook = model.register_forward_pre_hook(join, with_kwargs=True, prepend=True)
    try:
        yield
    finally:
        hook.remove()
