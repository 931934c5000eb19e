"""`AsyncGenerator`: a generator for programs that run on asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Unpack

from headport.errors import RequestError
from headport.runtime.conditions import Condition
from headport.runtime.generator import Generator
from headport.runtime.inputs import Input
from headport.runtime.parameters import Options
from headport.runtime.prompts import Prompt
from headport.runtime.results import Generation, Score, Token
from headport.runtime.submission import Submission

__all__ = ["AsyncGenerator", "AsyncSubmission", "AsyncTokenStream"]


class AsyncGenerator:
    """The calls of a `Generator`, to be awaited.

    The work is done by the generator's own thread, together with that of all other callers. A task
    that is cancelled while it waits cancels its request.

    Args:
        generator: Does the work; may be used directly as well.
    """

    def __init__(self, generator: Generator) -> None:
        self.generator = generator

    async def generate(
        self,
        prompts: Input | Sequence[Input],
        *,
        prefix: Prompt | None = None,
        condition: Condition | Sequence[Condition | None] | None = None,
        timeout: float | None = None,
        **options: Unpack[Options],
    ) -> list[Generation]:
        """See `Generator.generate`."""
        make = partial(self.submit, prompts, prefix=prefix, condition=condition, timeout=timeout)
        async with make(tokens=False, **options) as submission:
            return await submission.replies()

    def submit(
        self,
        prompts: Input | Sequence[Input],
        *,
        prefix: Prompt | None = None,
        condition: Condition | Sequence[Condition | None] | None = None,
        timeout: float | None = None,
        tokens: bool = True,
        **options: Unpack[Options],
    ) -> AsyncSubmission:
        """See `Generator.submit`.

        In place of a listener the submission can be iterated over, unless `tokens` is False.
        """
        make = partial(self.generator.submit, prompts, prefix=prefix, condition=condition)
        return AsyncSubmission(partial(make, timeout=timeout, **options), listens=tokens)

    def stream(
        self,
        prompt: Input,
        *,
        prefix: Prompt | None = None,
        condition: Condition | Sequence[Condition | None] | None = None,
        timeout: float | None = None,
        **options: Unpack[Options],
    ) -> AsyncTokenStream:
        """See `Generator.stream`; checks are made when it is entered or iterated over."""
        make = partial(self.generator.submit, [prompt], prefix=prefix, condition=condition)
        return AsyncTokenStream(partial(make, timeout=timeout, single=True, **options))

    async def score(self, texts: Prompt | Sequence[Prompt], **masks: Any) -> list[Score]:
        """See `Generator.score`."""
        return await asyncio.to_thread(self.generator.score, texts, **masks)

    async def close(self) -> None:
        """See `Generator.close`."""
        await asyncio.to_thread(self.generator.close)


class AsyncSubmission:
    """A request that is made when it is entered; its tokens as they come, then its replies.

    `async with` ends the request on the way out if it has not ended; so does letting go of it.

    Args:
        submit: Makes the request; gets the listener.
        listens: Tokens are wanted, not only replies.
    """

    def __init__(self, submit: Callable[..., Submission], *, listens: bool = True) -> None:
        self._submit = submit
        self._listens = listens
        self._arrived: asyncio.Queue[tuple[int, Token] | None] = asyncio.Queue()
        self._submission: Submission | None = None
        self._done = False

    async def start(self) -> None:
        """Make the request, unless it has been made.

        Raises:
            HeadportError: As `Generator.submit`.
        """
        if self._submission is not None:
            return
        loop = asyncio.get_running_loop()
        put = self._arrived.put_nowait

        def listen(place: int, token: Token) -> None:
            loop.call_soon_threadsafe(put, (place, token))

        def end(_: Any) -> None:
            # A loop that has been closed has nobody left who waits.
            if not loop.is_closed():
                loop.call_soon_threadsafe(put, None)

        # Checking a long prompt takes a while, so it is done in a thread. Where this task is
        # cancelled meanwhile the thread goes on, and what it brings must be cancelled too.
        listener = listen if self._listens else None
        made = asyncio.ensure_future(asyncio.to_thread(self._submit, listener=listener))
        try:
            self._submission = await asyncio.shield(made)
        except asyncio.CancelledError:
            made.add_done_callback(_cancel_late)
            raise
        self._submission.future.add_done_callback(end)

    def cancel(self) -> None:
        """Ask for an early end."""
        self._done = True
        if self._submission is not None:
            self._submission.cancel()

    async def replies(self) -> list[Generation]:
        """Wait for the replies.

        Raises:
            HeadportError: As `Submission.result`.
        """
        await self.start()
        assert self._submission is not None
        try:
            await asyncio.wrap_future(self._submission.future)
        except asyncio.CancelledError:
            self._submission.cancel()
            raise
        return self._submission.result()

    def __aiter__(self) -> AsyncSubmission:
        return self

    async def __anext__(self) -> tuple[int, Token]:
        """Place of a reply in the request, and its next token."""
        await self.start()
        found = None if self._done else await self._arrived.get()
        if found is not None:
            return found
        if not self._done:
            self._done = True
            await self.replies()  # raises what the request ended with
        raise StopAsyncIteration

    async def __aenter__(self) -> AsyncSubmission:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cancel()

    def __del__(self) -> None:
        submission = getattr(self, "_submission", None)
        if submission is not None:
            submission.cancel()


class AsyncTokenStream:
    """The tokens of one reply as they come. `generation` is there once it has ended.

    As a context manager it ends the request on the way out; so does letting go of it.

    Args:
        submit: Makes the request; gets the listener.
    """

    def __init__(self, submit: Callable[..., Submission]) -> None:
        self._submission = AsyncSubmission(submit)
        self._generation: Generation | None = None

    @property
    def generation(self) -> Generation:
        """The whole reply.

        Raises:
            RequestError: If the stream has not ended.
        """
        if self._generation is None:
            raise RequestError("the stream has not ended; take its remaining tokens first")
        return self._generation

    def close(self) -> None:
        """End the request if it has not ended; no more tokens come."""
        self._submission.cancel()

    def __aiter__(self) -> AsyncTokenStream:
        return self

    async def __anext__(self) -> Token:
        _, token = await anext(self._submission)
        if token.finish_reason is not None:
            [self._generation] = await self._submission.replies()
        return token

    async def __aenter__(self) -> AsyncTokenStream:
        await self._submission.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()


def _cancel_late(made: asyncio.Future[Submission]) -> None:
    if not made.cancelled() and made.exception() is None:
        made.result().cancel()
