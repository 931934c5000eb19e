"""How a reference process answers: requests on stdin, answers on stdout, failures by their name.

See `headport.validate.wire`. Imports no graph or runtime code.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
from collections.abc import Callable
from typing import IO, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from headport.errors import CheckpointError, HeadportError
from headport.validate.wire import Answer, Failure, Ready, Request, read_request, write_message

__all__ = ["Writer", "serve"]

Float32 = npt.NDArray[np.float32]


class _Loaded(Protocol):
    """A model that was loaded."""

    ready: Ready


_R = TypeVar("_R", bound=_Loaded)


class Writer:
    """Writes answers from a second thread, so that the next window is computed meanwhile.

    At most one answer waits and one is written: memory does not grow with the text.
    """

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._queue: queue.Queue[tuple[Answer, tuple[Float32, ...]] | None] = queue.Queue(maxsize=1)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def put(self, answer: Answer, arrays: tuple[Float32, ...] = ()) -> None:
        """Hand over an answer, and the arrays that follow it."""
        self._queue.put((answer, arrays))

    def close(self) -> None:
        """Wait until everything is written."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            while (item := self._queue.get()) is not None:
                write_message(self._stream, item[0])
                for array in item[1]:
                    self._stream.write(array.astype("<f4", copy=False).data.cast("B"))
                self._stream.flush()
        except OSError:  # nobody listens any more
            os._exit(1)


def serve(load: Callable[[], _R], answer: Callable[[_R, Request, Writer], None]) -> int:
    """Load a model, say so, and answer until stdin closes.

    Args:
        load: Loads it.
        answer: Puts the answer to one request.

    Returns:
        The exit code: 0, or that of what went wrong, which the other side was told.
    """
    # Libraries print on stdout; answers keep a descriptor of their own.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    writer = Writer(answers)
    try:
        reference = load()
        writer.put(reference.ready)
        while (request := read_request(sys.stdin.buffer)) is not None:
            answer(reference, request, writer)
    except HeadportError as error:
        writer.put(Failure(type(error).__name__, str(error)))
        return error.exit_code
    except MemoryError as error:
        writer.put(Failure(CheckpointError.__name__, f"the reference ran out of memory: {error}"))
        return CheckpointError.exit_code
    finally:
        writer.close()
    return 0
