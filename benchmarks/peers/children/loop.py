"""What every child does: read a line of JSON, feed tokens to a model, answer with a line of JSON.

Children run in their peer's own environment, so this file needs nothing but NumPy.
"""

from __future__ import annotations

import itertools
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

__all__ = ["Model", "serve"]


class Model(Protocol):
    """A model that continues one sequence."""

    kept_ids: list[int] | None  # token of each logit of a pruned model

    def reset(self, capacity: int) -> None:
        """Forget all tokens; up to `capacity` of them follow."""
        ...

    def feed(self, token_ids: Sequence[int]) -> np.ndarray[Any, Any]:
        """Append tokens; the logits after the last one, on the host, [V]."""
        ...


def serve(
    load: Callable[[], Any], actions: Mapping[str, Callable[..., dict[str, Any]]] | None = None
) -> None:
    """Load a model and answer requests until the input ends.

    Args:
        load: Makes a `Model`, or what `actions` take.
        actions: What a request may ask for, by name; by default `decode` and `score`.
    """
    # Libraries print; answers get a descriptor of their own.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    started = time.perf_counter()
    model = load()
    _say(answers, {"load_s": time.perf_counter() - started})
    for line in sys.stdin:
        asked = json.loads(line)
        _say(answers, (actions or _ACTIONS)[asked.pop("do")](model, **asked))


def _decode(model: Model, past: list[int], steps: list[int]) -> dict[str, Any]:
    """Seconds of the prompt, and of each further token fed alone."""
    model.reset(len(past) + len(steps))
    started = time.perf_counter()
    model.feed(past)
    seconds = [time.perf_counter() - started]
    for token_id in steps:
        started = time.perf_counter()
        model.feed([token_id])
        seconds.append(time.perf_counter() - started)
    return {"prefill_s": seconds[0], "step_s": seconds[1:], "peak_rss_bytes": _peak()}


def _score(model: Model, token_ids: list[int]) -> dict[str, Any]:
    """How well each token is foretold, fed one by one: -ln p, and the likeliest in its place.

    A pruned model's p is a share of the tokens it kept, so it is left out.
    """
    model.reset(len(token_ids))
    nll, first = [], []
    for now, following in itertools.pairwise(token_ids):
        logits = np.asarray(model.feed([now]), np.float64)
        best = int(logits.argmax())
        if model.kept_ids is not None:
            first.append(model.kept_ids[best])
            continue
        first.append(best)
        top = float(logits[best])
        nll.append(top + float(np.log(np.exp(logits - top).sum())) - float(logits[following]))
    return {"nll": nll, "first": first}


_ACTIONS: dict[str, Callable[..., dict[str, Any]]] = {"decode": _decode, "score": _score}


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _say(stream: Any, answer: dict[str, Any]) -> None:
    stream.write(json.dumps(answer) + "\n")
    stream.flush()
