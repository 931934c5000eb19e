"""Every head of a bundle on texts that are read once: logits, values, tasks, likeliest tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from headport.bundle import Bundle
from headport.clustered import ClusteredSoftmax, log_softmax, open_clusters
from headport.encoder_runner import EncoderRunner, is_encoder
from headport.errors import BundleError, PromptError, RequestError
from headport.head_answers import task_scores
from headport.heads import HeadMethods
from headport.manifest import AdaptiveHead, Head, TaskHead, TasksHead, TreeHead, ValueHead
from headport.providers import AUTO
from headport.runner import open_runner
from headport.runtime.prompts import Prompt, read_prompts
from headport.runtime.states import Positions, States, last_tokens, pick
from headport.runtime.text import Tokens
from headport.runtime.vocabulary import IdMap
from headport.session import SessionSettings
from headport.tuned import settings_of

__all__ = ["HeadStats", "Heads", "TaskScores"]

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]
_Kind = TypeVar("_Kind", bound=Head | TaskHead)


@dataclass(frozen=True)
class TaskScores:
    """What one task says about one text."""

    task: str
    labels: tuple[str, ...]
    scores: Float32  # [n] of a head that answers per text, [tokens, n] of one per position

    @property
    def best(self) -> str | list[str]:
        """The label with the highest score, or one per token."""
        found = self.scores.argmax(axis=-1)
        return self.labels[int(found)] if found.ndim == 0 else [self.labels[n] for n in found]


@dataclass
class HeadStats:
    """What was computed so far."""

    backbone_runs: int = 0
    # By head: hidden states that were asked about, and by cluster those whose tokens were scored.
    rows: dict[str, int] = field(default_factory=dict)
    cluster_rows: dict[str, dict[int, int]] = field(default_factory=dict)


class Heads:
    """All heads of a bundle. Texts are read once (`encode`), then any head is asked about them.

        heads = Heads("bundle")
        states = heads.encode(["It works.", "It does not."])  # one run of the backbone
        heads.values(states, "value")                         # one scalar per token
        heads.logits(states, "lm", positions="last")

    Ids are those of the original vocabulary. Where a head may be left out, it is the only one that
    answers what is asked. Not for several threads at once.

    Args:
        bundle: The folder, or an opened bundle; of a decoder or of an encoder.
        threads: ONNX Runtime threads; 0 = as the bundle records for this kind of machine, else
            all available cores.
        provider: Key or name of `headport.providers`; auto = what the target is for.
        cpu_fallback: Let operators that the provider lacks run on the CPU.
        verify: Check every file's sha256 before opening.

    Raises:
        BundleError: If the bundle is damaged, or reads sources beside its texts.
        UsageError: If the provider does not work here or cannot run the bundle.
    """

    def __init__(
        self,
        bundle: str | Path | Bundle,
        *,
        threads: int = 0,
        provider: str = AUTO,
        cpu_fallback: bool = False,
        verify: bool = True,
    ) -> None:
        opened = bundle if isinstance(bundle, Bundle) else Bundle.open(bundle, verify=verify)
        manifest = opened.manifest
        if manifest.source is not None:
            raise BundleError(
                f"{opened.path}: its model reads a source beside its texts; use Generator"
            )
        settings = settings_of(manifest, SessionSettings(threads, provider, cpu_fallback))
        self.bundle = opened
        self._ids = IdMap.from_bundle(opened)
        self._tokens = Tokens(opened)
        self._runner: Any = (
            EncoderRunner(opened, settings)
            if is_encoder(manifest)
            else open_runner(opened, settings)
        )
        if not isinstance(self._runner, HeadMethods):
            raise BundleError(f"{opened.path}: its target {manifest.target!r} runs no such heads")
        self._heads: dict[str, Head | TaskHead] = {**manifest.heads, **manifest.task_heads}
        self._clusters: dict[str, ClusteredSoftmax] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """All heads."""
        return tuple(self._heads)

    @property
    def mask_id(self) -> int | None:
        """The token that stands for one to be filled in; None where the tokenizer names none."""
        mask = self._tokens.special_tokens.get("mask_token")
        return None if mask is None else self._tokens.id_of(mask)

    def spell(self, token_id: int) -> str:
        """Text of one token alone; of a special token its name."""
        return self._tokens.decode([token_id]) or self._tokens.piece(token_id)

    @property
    def stats(self) -> HeadStats:
        """What was computed so far."""
        return HeadStats(
            backbone_runs=self._runner.runs,
            rows={name: each.rows for name, each in self._clusters.items()},
            cluster_rows={name: dict(each.reads) for name, each in self._clusters.items()},
        )

    def encode(self, texts: Prompt | Sequence[Prompt]) -> States:
        """Read texts, all at once: one run of the backbone or encoder.

        Args:
            texts: Texts or id lists, or one of them. An array [B, T] of ids may end its rows in
                padding, where the model reads from left to right.

        Raises:
            PromptError: If a text is empty, holds unknown ids, or is longer than the context; if
                padding would be read as text.
        """
        given: Any = texts
        rectangular = isinstance(given, np.ndarray) and given.ndim == 2
        if rectangular and isinstance(self._runner, EncoderRunner) and len(texts) > 1:
            raise PromptError(
                "an encoder would read the padding of an array as text; give each text as a list "
                "of its own length"
            )
        found = read_prompts(texts, self._tokens, self._ids.size)
        lengths = np.array([len(ids) for ids in found])
        context = self.bundle.manifest.model.max_context
        if long := np.flatnonzero(lengths > context).tolist():
            raise PromptError(
                f"texts {long} have {lengths[long].tolist()} tokens, the context holds {context}"
            )
        ids = np.zeros((len(found), int(lengths.max())), np.int64)
        for b, row in enumerate(found):
            ids[b, : len(row)] = row
        hidden = self._read(ids, lengths)
        rows = tuple(hidden[b, :n] for b, n in enumerate(lengths))
        return States(tuple(map(tuple, found)), rows, rectangular)

    def _read(self, ids: Int64, lengths: Int64) -> Float32:
        found: Float32
        if isinstance(self._runner, EncoderRunner):
            found = self._runner.encode(ids, lengths)
        else:
            cache = self._runner.new_cache(len(ids), ids.shape[1])
            found = self._runner.forward(cache, ids, lengths)
        return found

    def logits(
        self, states: States, head: str | None = None, positions: Positions = "all"
    ) -> list[Float32]:
        """Logits of a head over the vocabulary, per text [positions, V]; -inf where pruned.

        Raises:
            RequestError: If there is no such head or position.
        """
        name, _ = self._find(head, Head, "logits")
        rows, counts = pick(states, positions)
        logits = self._ids.spread(self._ids.rows(self._runner.full_logits(rows, name)))
        return _split(logits, counts)

    def values(self, states: States, head: str | None = None) -> list[Float32]:
        """Scalars of a value head, per text: [tokens], or [1] of a head that answers per text.

        Raises:
            RequestError: If there is no such head, or a text has no last token.
        """
        name, entry = self._find(head, ValueHead, "values")
        rows, counts = pick(states, _places(states, entry))
        return _split(self._runner.full_logits(rows, name)[:, 0], counts)

    def tasks(
        self, states: States, tasks: str | Sequence[str] | None = None, head: str | None = None
    ) -> list[TaskScores]:
        """Scores of one task per text; texts of one batch may want different tasks.

        Args:
            states: The texts.
            tasks: A task per text, or one for all; None: the head's only one.
            head: The head.

        Raises:
            RequestError: If there is no such head or task, or not one task per text.
        """
        name, entry = self._find(head, TasksHead, "tasks")
        wanted = _tasks_of(entry, tasks, name, len(states))
        rows, counts = pick(states, _places(states, entry))
        parts, found = _split(rows, counts), [np.zeros(0, np.float32)] * len(states)
        for task in dict.fromkeys(wanted):
            own = [b for b, each in enumerate(wanted) if each == task]
            scores = task_scores(self._runner, name, task, np.concatenate([parts[b] for b in own]))
            for b, each in zip(own, _split(scores, [counts[b] for b in own]), strict=True):
                found[b] = each[0] if entry.pooling == "last" else each
        return [
            TaskScores(task, entry.tasks[task].labels, scores)
            for task, scores in zip(wanted, found, strict=True)
        ]

    def log_probs(
        self, states: States, head: str | None = None, positions: Positions = "all"
    ) -> list[Float64]:
        """Log-probabilities of all tokens, per text [positions, V].

        Raises:
            RequestError: As `logits`.
            NonFiniteError: If a score is NaN or infinite.
        """
        name, entry = self._find_distribution(head)
        rows, counts = pick(states, positions)
        if isinstance(entry, Head):
            found = log_softmax(self._ids.rows(self._runner.full_logits(rows, name)))
        else:
            found = self._softmax(name, entry).log_probs(rows)[:, : self._ids.size]
        return _split(self._spread(found), counts)

    def top(
        self,
        states: States,
        count: int,
        head: str | None = None,
        positions: Positions = "all",
    ) -> list[tuple[Int64, Float64]]:
        """The most likely tokens, best first, equal ones by lowest id.

        Of an adaptive or tree softmax, only clusters that may hold one of them are computed.

        Returns:
            Per text, ids [positions, k] and their log-probabilities.

        Raises:
            RequestError: As `logits`; if `count` is not from 1 to the number of tokens.
            NonFiniteError: If a score is NaN or infinite.
        """
        name, entry = self._find_distribution(head)
        size = len(self._ids.ids)
        if not 1 <= count <= size:
            raise RequestError(f"count must be from 1 to {size}, {count} was given")
        rows, counts = pick(states, positions)
        if isinstance(entry, Head):
            found = log_softmax(self._ids.rows(self._runner.full_logits(rows, name)))
            places = np.argsort(-found, axis=1, kind="stable")[:, :count]
            ids, log_probs = self._ids.ids[places], np.take_along_axis(found, places, axis=1)
        else:
            ids, log_probs = _tokens_only(self._softmax(name, entry), rows, count, size)
        return list(zip(_split(ids, counts), _split(log_probs, counts), strict=True))

    def predict(
        self, states: States, head: str | None = None, positions: Positions = "all"
    ) -> list[Int64]:
        """The most likely token at each position, per text [positions]; as `top` with one."""
        return [ids[:, 0] for ids, _ in self.top(states, 1, head, positions)]

    def _softmax(self, name: str, entry: AdaptiveHead | TreeHead) -> ClusteredSoftmax:
        if name not in self._clusters:
            self._clusters[name] = open_clusters(self.bundle, self._runner, name, entry)
        return self._clusters[name]

    def _spread(self, rows: Float64) -> Float64:
        if len(self._ids.ids) == self._ids.size:
            return rows
        found = np.full((len(rows), self._ids.size), -np.inf)
        found[:, self._ids.ids] = rows
        return found

    def _find_distribution(self, head: str | None) -> tuple[str, Head | AdaptiveHead | TreeHead]:
        kinds = (Head, AdaptiveHead, TreeHead)
        return self._find(head, kinds, "probabilities of tokens")

    def _find(self, name: str | None, kind: Any, what: str) -> tuple[str, Any]:
        fitting = [n for n, entry in self._heads.items() if isinstance(entry, kind)]
        if name is None:
            if len(fitting) != 1:
                raise RequestError(
                    f"head: name one; heads that give {what}: {', '.join(fitting) or 'none'}"
                )
            name = fitting[0]
        if name not in self._heads:
            raise RequestError(f"no head {name!r} in the bundle (heads: {', '.join(self._heads)})")
        if name not in fitting:
            raise RequestError(
                f"head {name} gives no {what}; heads that do: {', '.join(fitting) or 'none'}"
            )
        return name, self._heads[name]


def _tokens_only(
    softmax: ClusteredSoftmax, rows: Float32, count: int, size: int
) -> tuple[Int64, Float64]:
    """As `ClusteredSoftmax.top`, without rows of the head that are no token (`size` and above)."""
    more = softmax.vocab_size - size
    ids, log_probs = softmax.top(rows, count + more)
    if not more:
        return ids, log_probs
    order = np.argsort(ids >= size, axis=1, kind="stable")[:, :count]
    return np.take_along_axis(ids, order, 1), np.take_along_axis(log_probs, order, 1)


def _places(states: States, entry: ValueHead | TasksHead) -> Positions:
    return "all" if entry.pooling == "none" else last_tokens(states, entry.pad_id)


def _tasks_of(
    entry: TasksHead, tasks: str | Sequence[str] | None, head: str, texts: int
) -> list[str]:
    known = ", ".join(entry.tasks)
    if tasks is None:
        if len(entry.tasks) > 1:
            raise RequestError(f"tasks: name one per text; head {head} has {known}")
        tasks = next(iter(entry.tasks))
    wanted = [tasks] * texts if isinstance(tasks, str) else list(tasks)
    if len(wanted) != texts:
        raise RequestError(f"tasks: one per text was expected: {texts}, {len(wanted)} given")
    if odd := [task for task in dict.fromkeys(wanted) if task not in entry.tasks]:
        raise RequestError(f"head {head} has no task {', '.join(map(repr, odd))}; it has {known}")
    return wanted


def _split(rows: npt.NDArray[Any], counts: Sequence[int]) -> list[Any]:
    return np.split(rows, np.cumsum(counts)[:-1])
