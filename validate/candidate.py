"""The candidate: a bundle as it runs, in bounded memory."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from headport.bundle import Bundle
from headport.condition import open_conditions
from headport.errors import BundleError, ParityError
from headport.runner import Cache, Candidates, open_runner
from headport.runtime.chat import chat_text
from headport.runtime.conditions import Condition, read_vector
from headport.runtime.results import Stats
from headport.runtime.text import Tokens as BundleTokens
from headport.session import SessionSettings
from headport.validate.documents import Tokens
from headport.validate.given_source import GivenSource
from headport.validate.records import Messages
from headport.validate.source_reader import open_sources

__all__ = ["CHUNK_TOKENS", "HEAD_NAME", "Candidate", "Proved"]

Float32 = npt.NDArray[np.float32]
Int64 = npt.NDArray[np.int64]

HEAD_NAME = "lm"
# Longer windows continue through the cache, as in use; it also bounds the attention's memory.
CHUNK_TOKENS = 512
_LOGIT_BYTES = 64 << 20  # of one block of head rows
_FULL_TOLERANCE = 1e-4  # of the largest logit; float32 products are within 1e-6


@dataclass(frozen=True)
class Proved:
    """Positions at which a certificate proved the first place, and the first ten."""

    positions: int
    first: int
    ten: int

    def add(self, certified_k: Int64) -> Proved:
        """These and more positions, [N]."""
        ranks = len(certified_k), int((certified_k >= 1).sum()), int((certified_k >= 10).sum())
        return Proved(self.positions + ranks[0], self.first + ranks[1], self.ten + ranks[2])

    def share(self, count: int) -> float:
        """A count as a share of the positions."""
        return count / max(1, self.positions)


class Candidate:
    """Runs a bundle's backbone and language-model head, and its tokenizer.

    A head that gives candidates is judged by what it says about the whole vocabulary: quantised
    logits, into which the exact ones of its candidates are written. Its full product, which
    `Generator.logits` and `score` use, is held against the candidates on the way.

    `sources` reads what an encoder-decoder bundle answers to; None of another bundle.

    Args:
        bundle: The bundle.
        threads: ONNX Runtime's.
        settings: The other settings of its sessions.
        condition: What hidden states are told, of a bundle with conditions.

    Raises:
        BundleError: If it has no head `lm`, or does not load.
        RequestError: If it takes no condition, or not this one.
    """

    def __init__(
        self,
        bundle: Bundle,
        threads: int,
        settings: SessionSettings | None = None,
        condition: Condition | None = None,
    ) -> None:
        head = bundle.manifest.heads.get(HEAD_NAME)
        if head is None or (head.outputs == "candidates") != (head.candidates is not None):
            found = "none" if head is None else f"one that gives {head.outputs} but not how"
            raise BundleError(
                f"{bundle.path}: a head {HEAD_NAME!r} that gives logits or candidates was "
                f"expected, {found} is there; other heads are for `headport validate-heads`"
            )
        self._bundle = bundle
        self.head = head
        self.tokens = BundleTokens(bundle)
        self.context = bundle.manifest.model.max_context
        self.vocab_size = head.vocab_size
        self.hidden_size = bundle.manifest.model.hidden_size
        self.block_rows = max(1, _LOGIT_BYTES // (4 * head.vocab_size))
        self.seconds = 0.0  # spent in backbone and head
        chosen = replace(settings or SessionSettings(), threads=threads)
        self.settings = chosen.for_target(bundle.manifest.target)
        self.proved = Proved(0, 0, 0)
        self._runner = open_runner(bundle, self.settings, heads=(HEAD_NAME,))
        self.sources = open_sources(bundle, self._runner, self.tokens)
        self._added = read_vector(condition, open_conditions(bundle), Stats())

    def encode(self, text: str, *, special_tokens: bool = True) -> Tokens:
        """Token ids, with what the tokenizer itself adds or without, and how far each reaches."""
        ids, ends = self.tokens.encode_with_ends(text, add_special_tokens=special_tokens)
        return Tokens(np.array(ids, np.int64), np.array(ends, np.int64))

    def render(self, messages: Messages, reply: bool) -> str:
        """A conversation as the bundle's chat template writes it.

        Raises:
            BundleError: If the bundle has no usable template.
            RequestError: If the template refuses the messages.
        """
        settings = {"add_generation_prompt": reply}
        return chat_text(self._bundle, self.tokens, messages, settings)

    def count_tokens(self, text: str) -> int:
        """Tokens of a text, special tokens not counted."""
        return len(self.tokens.encode(text, add_special_tokens=False))

    def special_tokens(self) -> str:
        """What the tokenizer itself puts around a document, in words."""
        plain = self.tokens.encode("a", add_special_tokens=False)
        full = self.tokens.encode("a")
        starts = range(len(full) - len(plain) + 1)
        at = next((i for i in starts if full[i : i + len(plain)] == plain), 0)
        before = " ".join(self.tokens.piece(i) for i in full[:at]) or "nothing"
        after = " ".join(self.tokens.piece(i) for i in full[at + len(plain) :]) or "nothing"
        return f"{before} before, {after} after"

    def hidden_states(
        self, windows: Sequence[Int64], sources: Sequence[GivenSource] = ()
    ) -> list[Float32]:
        """Hidden states of windows, run together as one ragged batch.

        Args:
            windows: Token ids, each [T], T ≥ 1.
            sources: What each answers to, of an encoder-decoder bundle.

        Returns:
            Per window [T, H], with what the condition adds.
        """
        started = time.perf_counter()
        lengths = np.array([len(window) for window in windows], np.int64)
        width = int(lengths.max())
        token_ids = np.zeros((len(windows), width), np.int64)
        for row, window in zip(token_ids, windows, strict=True):
            row[: len(window)] = window
        cache = self._new_cache(len(windows), width, sources)
        parts = []
        for start in range(0, width, CHUNK_TOKENS):
            chunk = token_ids[:, start : start + CHUNK_TOKENS]
            new = np.clip(lengths - start, 0, chunk.shape[1])
            parts.append(self._runner.forward(cache, chunk, new))
        hidden = self._told(np.concatenate(parts, axis=1))
        self.seconds += time.perf_counter() - started
        return [row[:length] for row, length in zip(hidden, lengths, strict=True)]

    def _told(self, hidden: Float32) -> Float32:
        return hidden if self._added is None else hidden + self._added

    def _new_cache(self, rows: int, capacity: int, sources: Sequence[GivenSource]) -> Cache:
        cache = self._runner.new_cache(rows, capacity)
        if self.sources is not None:
            self.sources.fill(cache, sources)
        return cache

    def logits(self, hidden_states: Float32) -> Float32:
        """Logits [N, V] of hidden states [N, H].

        Raises:
            ParityError: If candidates are not scored as the full product scores them.
        """
        started = time.perf_counter()
        output = self._runner.head(hidden_states, HEAD_NAME)
        logits = output.logits
        if output.candidates is not None:
            logits = self._rescored(hidden_states, output.candidates)
        assert logits is not None
        self.seconds += time.perf_counter() - started
        return logits

    def _rescored(self, hidden_states: Float32, candidates: Candidates) -> Float32:
        self.proved = self.proved.add(candidates.certified_k)
        full = self._runner.full_logits(hidden_states[:1], HEAD_NAME)[0]
        expected = full[candidates.ids[0]].astype(np.float64)
        error = np.abs(candidates.logits[0] - expected).max()
        if not error <= _FULL_TOLERANCE * np.abs(full).max():
            raise ParityError(
                f"a candidate's logit differs from the full product's by {error:.3g}; the head's "
                "graphs do not belong together, quantise the bundle again"
            )
        logits = self._runner.quantised(hidden_states, HEAD_NAME).logits
        np.put_along_axis(logits, candidates.ids, candidates.logits.astype(np.float32), axis=1)
        return logits

    def notes(self) -> tuple[str, ...]:
        """What a reader of the report must know about the head."""
        form = self.head.candidates
        if form is None:
            return ()
        first = (
            f"The head gives {form.count} candidates, scored with the original weight; all other "
            "tokens enter these figures with their quantised logits."
        )
        if not form.certified:
            return (first,)
        return (
            first,
            f"Of {self.proved.positions} positions the certificate proved the first place on "
            f"{self.proved.share(self.proved.first):.3%} and the first ten on "
            f"{self.proved.share(self.proved.ten):.3%}.",
        )

    def continue_greedily(
        self, prompts: Int64, steps: int, sources: Sequence[GivenSource] = ()
    ) -> Int64:
        """Greedy tokens, ties by lowest id, end-of-text tokens not heeded: [B, P] → [B, steps]."""
        batch_size, length = prompts.shape
        cache = self._new_cache(batch_size, length + steps, sources)
        fed = prompts
        chosen = np.empty((batch_size, steps), np.int64)
        for step in range(steps):
            new = np.full(batch_size, fed.shape[1], np.int64)
            hidden = self._runner.forward(cache, fed, new)
            last = self._told(np.ascontiguousarray(hidden[:, -1]))
            output = self._runner.head(last, HEAD_NAME)
            if output.candidates is not None:
                chosen[:, step] = output.candidates.ids[:, 0]
            else:
                assert output.logits is not None
                chosen[:, step] = output.logits.argmax(axis=1)
            fed = chosen[:, step : step + 1]
        return chosen
