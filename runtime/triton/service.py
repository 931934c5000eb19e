"""What `model.py` of a repository hands its requests to: one generator for all of them.

Triton brings requests one by one and does not wait for them; the generator joins them between
steps. Its tokens are sent from an event loop in a thread of its own.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec

from headport.errors import CancelledRequestError, HeadportError, UsageError
from headport.runtime.async_generator import AsyncGenerator
from headport.runtime.exact_option import EXACT
from headport.runtime.generator import Generator
from headport.runtime.serve.limits import ServiceLimits
from headport.runtime.serve.prompts import conversation_ids
from headport.runtime.triton.requests import Asked, read_request
from headport.runtime.triton.responder import Responder
from headport.runtime.triton.service_options import BUNDLE, ServiceOptions, read_service_options

__all__ = ["Service"]

_POLL_SECONDS = 0.1  # how often a request is asked whether its client has gone
_END_SECONDS = 30.0


class Service:
    """One instance of a model.

    Args:
        args: As Triton gives them to `initialize`.
        triton: The module `triton_python_backend_utils`; None: it is imported, which only works in
            the python backend's own process.

    Raises:
        TritonModelException: With what keeps the bundle from being served.
    """

    def __init__(self, args: Mapping[str, str], triton: Any = None) -> None:
        self._triton = triton or import_module("triton_python_backend_utils")
        try:
            self._options = read_service_options(msgspec.json.decode(args["model_config"]))
            self._limits = ServiceLimits(
                new_tokens=self._options.max_new_tokens,
                replies=self._options.max_replies,
                seconds=self._options.timeout,
            )
            self._generator = _open(args, self._options)
        except HeadportError as error:
            raise self._triton.TritonModelException(str(error)) from error
        self._async = AsyncGenerator(self._generator)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="headport")
        self._thread.start()

    def take(self, requests: Sequence[Any]) -> None:
        """Begin to answer requests."""
        for request in requests:
            responder = Responder(self._triton, request)
            try:
                # Read at once: a request's tensors go with this call.
                asked = self._read(request)
            except Exception as error:  # noqa: BLE001 - whatever it is, its client must be told
                responder.fail(error)
                continue
            asyncio.run_coroutine_threadsafe(self._answer(asked, responder), self._loop)

    def close(self) -> None:
        """End what runs, with an error for its clients, and the thread."""
        self._generator.close()
        asyncio.run_coroutine_threadsafe(_others_end(), self._loop).result(_END_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_END_SECONDS)

    def _read(self, request: Any) -> Asked:
        def tensors(name: str) -> Any:
            found = self._triton.get_input_tensor_by_name(request, name)
            return None if found is None else found.as_numpy()

        parameters = msgspec.json.decode(request.parameters() or "{}")
        chat_ids = partial(conversation_ids, self._generator)
        asked = read_request(tensors, parameters, chat_ids)
        self._limits.check(1, {"n": self._generator.defaults.n} | asked.options)
        return asked

    async def _answer(self, asked: Asked, responder: Responder) -> None:
        work = asyncio.ensure_future(self._work(asked, responder))
        watch = asyncio.ensure_future(_until_cancelled(responder))
        try:
            await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                work.cancel()
            await work
        except asyncio.CancelledError:
            responder.fail(CancelledRequestError("the client has gone"))
        except Exception as error:  # noqa: BLE001 - whatever it is, its client must be told
            responder.fail(error)
        finally:
            watch.cancel()

    async def _work(self, asked: Asked, responder: Responder) -> None:
        seconds = self._options.timeout
        if not asked.stream:
            prompts = [asked.prompt]
            responder.replies(await self._async.generate(prompts, timeout=seconds, **asked.options))
            return
        async with self._async.stream(asked.prompt, timeout=seconds, **asked.options) as tokens:
            async for token in tokens:
                last = token.finish_reason is not None
                responder.token(token, tokens.generation.seed if last else None)


async def _until_cancelled(responder: Responder) -> None:
    while not responder.cancelled:
        await asyncio.sleep(_POLL_SECONDS)


async def _others_end() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    await asyncio.gather(*others, return_exceptions=True)


def _open(args: Mapping[str, str], options: ServiceOptions) -> Generator:
    gpu = args.get("model_instance_device_id", "0")
    if args.get("model_instance_kind") == "GPU" and gpu != "0":
        raise UsageError(
            f"an instance on GPU {gpu} was asked for, headport runs on the first that it sees; "
            "give gpus: [ 0 ], and each server a GPU of its own"
        )
    return Generator(
        Path(args["model_repository"]) / args["model_version"] / BUNDLE,
        threads=options.threads,
        exact=EXACT[options.exact],
        max_context=options.max_context,
        reply_limit=options.max_new_tokens,
        slots=options.slots,
        prefill_chunk=options.prefill_chunk,
        max_waiting=options.max_waiting,
    )
