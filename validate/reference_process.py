"""The reference process, seen from the validating side: started, asked, and always ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import IO, TypeVar

import numpy as np
import numpy.typing as npt

from headport import errors
from headport.errors import HeadportError, ReferenceProcessError
from headport.freed_memory import ENVIRONMENT
from headport.validate.given_source import GivenSource
from headport.validate.records import Messages
from headport.validate.top_rows import TopRows
from headport.validate.wire import (
    Answer,
    Answered,
    AskHeads,
    Continued,
    ContinueGreedily,
    Draw,
    Drawn,
    Encode,
    EncodeChats,
    Encoded,
    Failure,
    Layered,
    Layers,
    Lens,
    Lensed,
    Ready,
    Request,
    Score,
    Scored,
    read_answer,
    write_message,
)

__all__ = [
    "ADAPTER_FLAG",
    "CONDITION_FLAG",
    "PROJECTION_FLAG",
    "SOURCED_FLAG",
    "ReferenceProcess",
    "ScoredBlock",
]

ADAPTER_FLAG = "--adapter="  # read by reference.py
PROJECTION_FLAG, CONDITION_FLAG = "--projection=", "--condition="  # likewise, both or none
SOURCED_FLAG = "--sourced"  # an encoder-decoder model is expected; read by reference.py

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]
_A = TypeVar("_A", bound=Answer)

_PIPE_BYTES = 1 << 20
_LAST_WORDS = 2000  # characters of the process's stderr that are kept
_PATIENCE_S = 5.0


@dataclass(frozen=True)
class ScoredBlock:
    """Consecutive positions of a window. `logits` is overwritten by the next block."""

    start: int  # first position, in the window
    logits: Float32  # [N, V]; [N, 0] where `top` stands for them
    near_tie_bound: Float64  # [N]
    hidden: Float32 | None = None  # [N, H], what goes into the head, where it was asked for
    top: TopRows | None = None  # the likeliest tokens, where nothing else is known


class ReferenceProcess:
    """A child process that holds the PyTorch model. Use as a context manager.

    Requests are answered in order. A window may be asked for before the answer to the one
    before it was read; then both sides compute at the same time.
    """

    def __init__(
        self,
        model: str,
        threads: int = 1,
        *flags: str,
        module: str = "headport.validate.reference",
    ) -> None:
        """Start loading `model` at once; `threads` < 1 counts as 1.

        `flags` are --trust-remote-code, --allow-pickle and --adapter=FOLDER, as `headport export`
        takes them, --sourced, where an encoder-decoder model is expected, and --projection=FILE
        with --condition=NAME, as `tell_condition` takes them. `module` is run.
        """
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed in __exit__
        environment = {
            **ENVIRONMENT,  # the user's own settings of malloc come after it
            **os.environ,
            "OMP_NUM_THREADS": str(max(1, threads)),
            "MKL_NUM_THREADS": str(max(1, threads)),
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, model, *flags],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=environment,
            pipesize=_PIPE_BYTES,
        )
        self._ready: Ready | None = None
        self.seconds = 0.0  # spent in forward passes of `score`

    def __enter__(self) -> ReferenceProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        process = self._process
        process.terminate()
        try:
            process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for stream in (process.stdin, process.stdout, self._errors):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):  # a request that was never read
                stream.close()

    def ready(self) -> Ready:
        """Facts of the model; the first call waits until it is loaded.

        Raises:
            CheckpointError: If it cannot be loaded.
            ReferenceProcessError: If the process died.
        """
        if self._ready is None:
            self._ready = self._receive(Ready)
        return self._ready

    def encode(self, texts: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Token ids of texts as the checkpoint's own tokenizer gives them."""
        self._send(Encode(tuple(texts)))
        return self._receive(Encoded).token_ids

    def encode_chats(self, chats: Sequence[Messages]) -> tuple[tuple[int, ...], ...]:
        """Token ids of conversations as the checkpoint's own chat template gives them."""
        self._send(EncodeChats(tuple(chats)))
        return self._receive(Encoded).token_ids

    def ask_score(
        self,
        token_ids: Int64,
        *,
        hidden: bool = False,
        other_path: bool = False,
        source: GivenSource | None = None,
    ) -> None:
        """Ask for the logits of a window; `read_score` gets them.

        Args:
            token_ids: [T].
            hidden: Whether to ask for what goes into the head too.
            other_path: Whether to take the second code path.
            source: What an encoder-decoder model answers to.
        """
        self._send(Score(tuple(token_ids.tolist()), hidden, other_path, source))

    def read_score(self, rows: int) -> Iterator[ScoredBlock]:
        """The oldest unanswered window, in blocks of at most `rows` positions.

        The iterator must be used up before anything else is asked for an answer.
        """
        scored = self._receive(Scored)
        self.seconds += scored.seconds
        bound = np.array(scored.near_tie_bound)
        hidden = np.empty((scored.rows, scored.hidden_size), "<f4")
        if scored.hidden_size:
            self._fill(hidden.data.cast("B"))
        buffer = np.empty((min(rows, scored.rows), scored.vocab_size), "<f4")
        for start in range(0, scored.rows, rows):
            block = buffer[: min(rows, scored.rows - start)]
            self._fill(block.data.cast("B"))
            inside = slice(start, start + len(block))
            states = hidden[inside] if scored.hidden_size else None
            yield ScoredBlock(start, block, bound[inside], states)

    def ask_greedy(self, prompts: Int64, steps: int, sources: Sequence[GivenSource] = ()) -> None:
        """Ask for greedy continuations of prompts [B, P]; `read_greedy` gets them."""
        rows = tuple(tuple(row) for row in prompts.tolist())
        self._send(ContinueGreedily(rows, steps, tuple(sources)))

    def read_greedy(self) -> Continued:
        """The oldest unanswered continuations."""
        return self._receive(Continued)

    def draw(self, request: Draw) -> tuple[Drawn, Float32]:
        """Tokens drawn by the reference's sampler, and the logits [V] they were drawn from."""
        self._send(request)
        answer = self._receive(Drawn)
        logits = np.empty(answer.vocab_size, "<f4")
        self._fill(logits.data.cast("B"))
        return answer, logits

    def layer_states(self, token_ids: Int64, *, other_path: bool = False) -> Float32 | None:
        """The states between layers [stages, T, H], see `layers.LayerWatch`; None: no such."""
        self._send(Layers(tuple(token_ids.tolist()), other_path))
        answer = self._receive(Layered)
        states = np.empty((answer.stages, answer.rows, answer.hidden_size), "<f4")
        if not answer.stages:
            return None
        self._fill(states.data.cast("B"))
        return states

    def lens(self, token_ids: Int64) -> Lensed:
        """What the model would say after each layer, of tokens [T]."""
        self._send(Lens(tuple(token_ids.tolist())))
        return self._receive(Lensed)

    def ask_heads(self, token_ids: Int64) -> None:
        """Ask what every head says about a text [T]; `read_heads` gets it."""
        self._send(AskHeads(tuple(token_ids.tolist())))

    def read_heads(self) -> dict[str, dict[str, Float32]]:
        """The oldest unanswered text: head → its arrays by name."""
        found: dict[str, dict[str, Float32]] = {}
        for head, name, shape in self._receive(Answered).arrays:
            array = np.empty(shape, "<f4")
            if array.size:
                self._fill(array.data.cast("B"))
            found.setdefault(head, {})[name] = array
        return found

    def _send(self, request: Request) -> None:
        assert self._process.stdin is not None
        try:
            write_message(self._process.stdin, request)
        except BrokenPipeError:
            self.ready()  # raises the reason, where the process could give one
            raise self._death() from None

    def _receive(self, kind: type[_A]) -> _A:
        assert self._process.stdout is not None
        if kind is not Ready:
            self.ready()  # always the first answer
        answer = read_answer(self._process.stdout)
        if answer is None:
            raise self._death()
        if isinstance(answer, Failure):
            failure: type[HeadportError] = getattr(errors, answer.error)
            raise failure(answer.message)
        assert isinstance(answer, kind), f"{kind.__name__} expected, {answer} found"
        return answer

    def _fill(self, view: memoryview) -> None:
        assert self._process.stdout is not None
        while view:
            count = self._process.stdout.readinto(view)  # type: ignore[attr-defined]
            if not count:
                raise self._death()
            view = view[count:]

    def _death(self) -> ReferenceProcessError:
        status = self._process.wait()
        how = f"exit code {status}"
        if status < 0:
            how = f"signal {signal.Signals(-status).name}"
            if -status == signal.SIGKILL:
                how += ", as when memory runs out"
        self._errors.seek(0)
        text = self._errors.read().decode("utf-8", errors="replace")[-_LAST_WORDS:]
        words = [line.strip() for line in text.splitlines() if line.strip()]
        last = f"; its last words: {words[-1]}" if words else ""
        return ReferenceProcessError(f"the reference process ended early ({how}){last}")
