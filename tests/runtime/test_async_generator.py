"""The generator's calls, awaited."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest

from headport.errors import CancelledRequestError, DeadlineError, PromptError, RequestError
from headport.runtime import AsyncGenerator

NEW = {"max_new_tokens": 6, "eos_token_id": ()}


def test_replies_streams_and_scores(make: Any) -> None:
    sync = make()

    async def ask() -> None:
        model = AsyncGenerator(make())
        many = await asyncio.gather(*(model.generate([[n]], **NEW) for n in range(1, 20)))
        assert many == [sync.generate([[n]], **NEW) for n in range(1, 20)]
        stream = model.stream("ab", temperature=1.0, seed=3, **NEW)
        with pytest.raises(RequestError, match="has not ended"):
            _ = stream.generation
        tokens = [token async for token in stream]
        [reply] = sync.generate("ab", temperature=1.0, seed=3, **NEW)
        assert [token.token_id for token in tokens] == reply.token_ids
        assert "".join(token.text for token in tokens) == reply.text
        assert stream.generation == reply
        [score] = await model.score(["abc"], prompt_tokens=2)
        assert score.mean == sync.score(["abc"], prompt_tokens=2)[0].mean
        beams = await model.generate("ab", num_beams=3, n=2, **NEW)
        assert [b.score for b in beams] == [
            b.score for b in sync.generate("ab", num_beams=3, n=2, **NEW)
        ]
        await model.close()
        assert model.generator.closed

    asyncio.run(ask())


def test_a_request_with_several_replies_tells_which_is_which(make: Any) -> None:
    async def ask() -> None:
        options = {"n": 2, "temperature": 1.0, "seed": 1, **NEW}
        async with AsyncGenerator(make()).submit(["ab", "cd"], **options) as submission:
            found: dict[int, list[int]] = {}
            async for place, token in submission:
                found.setdefault(place, []).append(token.token_id)
            replies = await submission.replies()
        assert found == {n: reply.token_ids for n, reply in enumerate(replies)}
        assert replies == make().generate(["ab", "cd"], **options)

    asyncio.run(ask())


def test_what_is_wrong_is_raised_where_it_is_awaited(make: Any) -> None:
    async def ask() -> None:
        model = AsyncGenerator(make())
        with pytest.raises(PromptError, match="prompt 0 is empty"):
            await model.generate("")
        with pytest.raises(PromptError):
            async with model.stream(""):
                pass
        with pytest.raises(RequestError, match=r"n=2 cannot be streamed"):
            await anext(model.stream("ab", n=2, temperature=1.0))
        with pytest.raises(RequestError, match="timeout must be seconds above 0"):
            await model.generate("ab", timeout=0)
        with pytest.raises(RequestError, match="timeout must be seconds above 0"):
            await model.generate("ab", timeout=10**400)  # beyond every float

    asyncio.run(ask())


@pytest.fixture
def held(make: Any) -> Any:
    """A generator whose runs wait until an event is set."""
    generator, free = make(), threading.Event()
    hidden = generator._runner.hidden

    def wait(*given: Any) -> Any:
        assert free.wait(30)
        return hidden(*given)

    generator._runner.hidden = wait
    tickets, submit = [], generator._scheduler.submit

    def noted(*given: Any) -> Any:
        tickets.append(submit(*given))
        return tickets[-1]

    generator._scheduler.submit = noted
    yield AsyncGenerator(generator), free, tickets
    free.set()


async def until(holds: Callable[[], bool]) -> None:
    async def wait() -> None:
        while not holds():
            await asyncio.sleep(0.001)

    await asyncio.wait_for(wait(), 30)


def test_a_task_that_is_cancelled_cancels_its_request(held: Any, make: Any) -> None:
    model, free, tickets = held

    async def ask() -> None:
        other = asyncio.create_task(model.generate("cd", **NEW))
        await until(lambda: len(tickets) == 1)
        task = asyncio.create_task(model.generate("ab", **NEW))
        await until(lambda: len(tickets) == 2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: tickets[1]._cancelled)
        free.set()
        assert await other == make().generate("cd", **NEW)
        assert model.generator.stats.cancelled == 1

    asyncio.run(ask())


def test_replies_whose_wait_is_cancelled_are_cancelled(held: Any) -> None:
    model, _, tickets = held

    async def ask() -> None:
        submission = model.submit("ab", **NEW)
        await submission.start()
        task = asyncio.create_task(submission.replies())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert tickets[0]._cancelled

    asyncio.run(ask())


def test_a_task_that_is_cancelled_before_its_request_is_made(held: Any) -> None:
    model, free, tickets = held
    submit, begun, made = model.generator.submit, threading.Event(), threading.Event()

    def slowly(*given: Any, **options: Any) -> Any:
        begun.set()
        assert made.wait(30)
        return submit(*given, **options)

    model.generator.submit = slowly

    async def ask() -> None:
        task = asyncio.create_task(model.generate("ab", **NEW))
        await until(begun.is_set)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        made.set()
        await until(lambda: bool(tickets) and tickets[0]._cancelled)
        free.set()
        with pytest.raises(CancelledRequestError):
            await asyncio.wrap_future(tickets[0].future)

    asyncio.run(ask())


def test_a_stream_that_is_left_ends_its_request(held: Any) -> None:
    model, free, _ = held

    async def ask() -> None:
        async with model.stream("ab", **NEW) as stream:
            inner = stream._submission._submission
        free.set()
        with pytest.raises(CancelledRequestError):
            await asyncio.wrap_future(inner.future)
        assert [token async for token in stream] == []

    asyncio.run(ask())


def test_a_stream_that_nobody_holds_ends_its_request(held: Any) -> None:
    model, _, tickets = held

    async def ask() -> None:
        stream: Any = model.stream("ab", **NEW)
        await stream._submission.start()
        assert not tickets[0]._cancelled
        del stream
        gc.collect()
        assert tickets[0]._cancelled

    asyncio.run(ask())


def test_time_that_is_over(held: Any) -> None:
    model, free, _ = held

    async def ask() -> None:
        task = asyncio.create_task(model.generate("ab", timeout=0.05, **NEW))
        await asyncio.sleep(0.1)
        free.set()
        with pytest.raises(DeadlineError):
            await task

    asyncio.run(ask())
