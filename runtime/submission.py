"""What a caller holds while its request is worked on: replies to come, or a stream of tokens."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

from headport.errors import RequestError
from headport.runtime.results import Generation, Token
from headport.runtime.row import Row
from headport.runtime.scheduling.tickets import Ticket

__all__ = ["Submission", "TokenStream"]


class Submission:
    """Replies on their way.

    Args:
        ticket: Its result are the rows of all replies.
        replies: Rows → replies.
        seeds: Of each row; None where nothing is drawn.
        owner: Kept as long as this is; a generator that nobody holds closes.
    """

    def __init__(
        self,
        ticket: Ticket,
        replies: Callable[[Sequence[Row]], list[Generation]],
        seeds: Sequence[int | None],
        owner: object,
    ) -> None:
        self._ticket = ticket
        self._replies = replies
        self._owner = owner
        self.seeds = tuple(seeds)

    @property
    def future(self) -> Future[Any]:
        """Ends when the replies are there or will not come; its value is the runtime's own."""
        return self._ticket.future

    def cancel(self) -> None:
        """Ask for an early end: `result` then raises `CancelledRequestError`."""
        self._ticket.cancel()

    def check_may_wait(self) -> None:
        """Refuse a wait in a listener or a callback of the same generator, which would never end.

        Raises:
            RequestError: If this is one, and the request still runs.
        """
        self._ticket.check_may_wait()

    def result(self) -> list[Generation]:
        """Wait for the replies.

        Raises:
            HeadportError: What the request ended with. Of `generate`'s errors those that come up
                while it runs; `CancelledRequestError`, `DeadlineError`, `ClosedError`.
        """
        return self._replies(self._ticket.result())


class TokenStream(Iterator[Token]):
    """The tokens of one reply as they come. `generation` is there once it has ended.

    The reply is worked on whether its tokens are taken or not. A stream that is closed, left as a
    context manager, or no longer held ends its request.

    Args:
        submit: Makes the request; gets the listener.
    """

    def __init__(self, submit: Callable[..., Submission]) -> None:
        self._arrived: queue.SimpleQueue[Token | None] = queue.SimpleQueue()
        self._done = False  # no more tokens are given out
        self._ended = False  # the last token was
        # What the request calls holds the queue and not the stream, which would else never be let
        # go while the request runs.
        put = self._arrived.put
        self._submission = submit(listener=lambda _, token: put(token))
        self._submission.future.add_done_callback(lambda _: put(None))

    @property
    def seed(self) -> int | None:
        """As `Generation.seed`, from the start."""
        return self._submission.seeds[0]

    def __next__(self) -> Token:
        if not self._done and self._arrived.empty():
            self._submission.check_may_wait()
        token = None if self._done else self._arrived.get()
        if token is not None:
            self._ended = token.finish_reason is not None
            return token
        if not self._done:
            self._done = True
            self._submission.result()  # raises what the request ended with
        raise StopIteration

    @property
    def generation(self) -> Generation:
        """The whole reply.

        Raises:
            RequestError: If its last token has not been taken.
        """
        if not self._ended:
            raise RequestError("the stream has not ended; take its remaining tokens first")
        [found] = self._submission.result()
        return found

    def close(self) -> None:
        """End the request if it has not ended; no more tokens come."""
        self._done = True
        self._submission.cancel()

    def __enter__(self) -> TokenStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        submission = getattr(self, "_submission", None)
        if submission is not None:
            submission.cancel()
