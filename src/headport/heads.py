"""Running a bundle's heads: all logits, or candidates scored with the original weight."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from headport.bundle import Bundle
from headport.errors import BundleError
from headport.head_parts import all_parts
from headport.head_subset import HeadSubset
from headport.manifest import Head
from headport.session import Session, SessionSettings, open_session

__all__ = ["Candidates", "HeadMethods", "HeadOutput", "HeadSessions", "QuantisedLogits"]

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]
Array = npt.NDArray[Any]

_CANDIDATE_ROWS = 32
_CANDIDATE_OUTPUTS = (
    "candidate_ids",
    "candidate_logits",
    "logsumexp",
    "certified_k",
    "cut",
    "error",
)


@dataclass(frozen=True)
class Candidates:
    """A head's best M tokens per row, sorted by logit, ties by lowest id.

    Logits are products with the original weight in float64. With noise, tokens were picked by
    upper bound + noise; they are still sorted by logit, and `certified_k` is 0.
    """

    ids: Int64  # [N, M]
    logits: Float64  # [N, M]
    logsumexp: Float64  # [N], over the whole vocabulary; other tokens enter with quantised logits
    certified_k: Int64  # [N], how many leading candidates are proved to be in their true place
    cut: Float64  # [N], no other token's logit (+ noise) is above it; +inf where nothing is known
    error: Float64  # [N], how far a logit may be from the real number


@dataclass(frozen=True)
class QuantisedLogits:
    """What a head that gives candidates ranked the whole vocabulary by."""

    logits: Float32  # [N, V], products with the quantised weight
    upper_bounds: Float32  # [N, V], no exact logit is above it; equal to `logits` if not certified


@dataclass(frozen=True)
class HeadOutput:
    """What a head gave for N rows: exactly the form its manifest entry declares."""

    logits: Float32 | None  # [N, V]
    candidates: Candidates | None


class HeadSessions:
    """The heads of one bundle. Methods are those of `headport.runner.Runner`.

    Parts of heads that are not of a vocabulary (`headport.head_parts`) are opened when first asked
    for; hidden states always are those of the backbone, also where a graph comes before the head.

    Raises:
        BundleError: If a graph does not load.
    """

    def __init__(
        self, bundle: Bundle, settings: SessionSettings, names: tuple[str, ...] | None
    ) -> None:
        self._bundle = bundle
        self._settings = settings
        self._full: dict[str, Session] = {}
        self._subsets: dict[str, HeadSubset] = {}
        self._sessions: dict[str, tuple[Head, Session]] = {}
        self._transforms: dict[str, Session] = {}
        heads = bundle.manifest.heads
        for name in names if names is not None else tuple(heads):
            self._sessions[name] = (heads[name], self._open(heads[name].graph))
        self._parts = {n: part for n, part in all_parts(bundle.manifest).items() if n not in heads}

    def _open(self, graph: str) -> Session:
        manifest = self._bundle.manifest
        file = self._bundle.path / manifest.graphs[graph].file
        return open_session(file, manifest.session_options, self._settings)

    def cpu_operators(self) -> dict[str, int]:
        """As `headport.runner.Runner.cpu_operators`, of the heads alone."""
        opened = [session for _, session in self._sessions.values()]
        opened += self._transforms.values()
        return dict(sum((Counter(session.cpu_operators) for session in opened), Counter()))

    def head(
        self, hidden_states: Float32, name: str = "lm", noise: Float32 | None = None
    ) -> HeadOutput:
        head, session = self._head(name)
        hidden_states = self._states(head, hidden_states)
        if head.outputs == "logits":
            assert noise is None, "a head that gives all logits picks nothing"
            [logits] = _run_head(session, hidden_states, ("logits",))
            return HeadOutput(logits.astype(np.float32, copy=False), None)
        # In slices: each row gathers M rows of the weight.
        parts = [
            _candidates(session, hidden_states[rows], None if noise is None else noise[rows])
            for rows in _slices(len(hidden_states), _CANDIDATE_ROWS)
        ]
        return HeadOutput(None, parts[0] if len(parts) == 1 else _concatenate(parts))

    def full_logits(self, hidden_states: Float32, name: str = "lm") -> Float32:
        head, _ = self._head(name)
        return self._full_logits(self._states(head, hidden_states), name=name)

    def _full_logits(self, states: Float32, name: str) -> Float32:
        head, session = self._head(name)
        if head.candidates is not None:
            session = self._full_session(head.candidates.full)
        [logits] = _run_head(session, states, ("logits",))
        return logits.astype(np.float32, copy=False)

    def rows(self, hidden_states: Float32, token_ids: Int64, name: str = "lm") -> Float32:
        head, _ = self._head(name)
        if name not in self._subsets:
            full = partial(self._full_logits, name=name)
            self._subsets[name] = HeadSubset(self._bundle, name, full)
        return self._subsets[name].logits(self._states(head, hidden_states), token_ids)

    def states(self, hidden_states: Float32, name: str = "lm") -> Float32:
        head, _ = self._head(name)
        return self._states(head, hidden_states)

    def quantised(self, hidden_states: Float32, name: str = "lm") -> QuantisedLogits:
        head, session = self._head(name)
        if head.outputs != "candidates":
            raise BundleError(f"head {name!r} gives {head.outputs}, candidates were expected")
        hidden_states = self._states(head, hidden_states)
        wanted = ("quantised_logits", "upper_bounds")
        parts = [
            _run_head(session, hidden_states[rows], wanted, _no_noise())
            for rows in _slices(len(hidden_states), _CANDIDATE_ROWS)
        ]
        return QuantisedLogits(*(np.concatenate(each) for each in zip(*parts, strict=True)))

    def rescored_logits(self, hidden_states: Float32, name: str = "lm") -> Float32:
        head, session = self._head(name)
        hidden_states = self._states(head, hidden_states)
        wanted = ("quantised_logits", "candidate_ids", "candidate_logits")
        parts = []
        for rows in _slices(len(hidden_states), _CANDIDATE_ROWS):
            logits, ids, exact = _run_head(session, hidden_states[rows], wanted, _no_noise())
            np.put_along_axis(logits, ids, exact.astype(np.float32), axis=1)
            parts.append(logits)
        return np.concatenate(parts)

    def _head(self, name: str) -> tuple[Head, Session]:
        if name not in self._sessions and name in self._parts:
            part = self._parts[name]
            self._sessions[name] = (part, self._open(part.graph))
        if name not in self._sessions:
            known = ", ".join(self._sessions) or "none"
            raise BundleError(f"no head {name!r} is loaded (loaded: {known})")
        return self._sessions[name]

    def _states(self, head: Head, hidden_states: Float32) -> Float32:
        """What the head itself is given, [N, F]: hidden states [N, H], or what is made of them."""
        if head.transform is None:
            return hidden_states
        if head.transform not in self._transforms:  # heads may share it
            self._transforms[head.transform] = self._open(head.transform)
        [states] = _run_head(self._transforms[head.transform], hidden_states, ("states",))
        return states.astype(np.float32, copy=False)

    def _full_session(self, graph: str) -> Session:
        # Opened when first needed: most tokens never need it, and it holds the whole weight.
        if graph not in self._full:
            self._full[graph] = self._open(graph)
        return self._full[graph]


class HeadMethods:
    """What every runner of ONNX Runtime sessions has from its heads; see `Runner`."""

    _heads: HeadSessions

    def head(
        self, hidden_states: Float32, name: str = "lm", noise: Float32 | None = None
    ) -> HeadOutput:
        return self._heads.head(hidden_states, name, noise)

    def full_logits(self, hidden_states: Float32, name: str = "lm") -> Float32:
        return self._heads.full_logits(hidden_states, name)

    def rows(self, hidden_states: Float32, token_ids: Int64, name: str = "lm") -> Float32:
        """Logits [N, n] of some tokens, in their order, from their rows of the head alone.

        They are those of `full_logits` within the bound of `headport.head_rows`; where the head's
        kernel rounds activations, or the tokens are many, they are taken from it.

        Args:
            hidden_states: [N, H].
            token_ids: The head's columns, [n].
            name: The head.

        Raises:
            BundleError: If a column does not exist.
        """
        return self._heads.rows(hidden_states, token_ids, name)

    def states(self, hidden_states: Float32, name: str = "lm") -> Float32:
        """What a head's own graph is given [N, F] for hidden states [N, H]."""
        return self._heads.states(hidden_states, name)

    def quantised(self, hidden_states: Float32, name: str = "lm") -> QuantisedLogits:
        return self._heads.quantised(hidden_states, name)

    def rescored_logits(self, hidden_states: Float32, name: str = "lm") -> Float32:
        return self._heads.rescored_logits(hidden_states, name)


def _slices(rows: int, step: int) -> Iterator[slice]:
    for start in range(0, max(rows, 1), step):
        yield slice(start, start + step)


def _no_noise() -> Float32:
    return np.zeros((1, 1), np.float32)


def _run_head(
    session: Session,
    hidden_states: Float32,
    outputs: tuple[str, ...],
    noise: Float32 | None = None,
) -> list[Array]:
    rows = np.ascontiguousarray(hidden_states, dtype=session.dtype("hidden_states"))
    feeds: dict[str, Array] = {"hidden_states": rows}
    if noise is not None:
        feeds["noise"] = np.ascontiguousarray(noise, np.float32)
    found = session.run(feeds, outputs)
    return [found[name] for name in outputs]


def _candidates(session: Session, hidden_states: Float32, noise: Float32 | None) -> Candidates:
    given = _no_noise() if noise is None else noise
    found = Candidates(*_run_head(session, hidden_states, _CANDIDATE_OUTPUTS, given))
    if noise is None:
        return found
    # Ranks were not picked by logit alone, so the graph's count says nothing.
    return replace(found, certified_k=np.zeros_like(found.certified_k))


def _concatenate(parts: Sequence[Candidates]) -> Candidates:
    """Candidates of several slices of rows as one record."""
    names = [field.name for field in fields(Candidates)]
    return Candidates(*(np.concatenate([getattr(p, name) for p in parts]) for name in names))
