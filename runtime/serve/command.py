"""`headport serve`: a bundle over HTTP until it is told to stop."""

from __future__ import annotations

import dataclasses
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

from headport.bundle import Bundle
from headport.command import OptionRecord, Outcome, option, positional
from headport.errors import UsageError
from headport.progress import say
from headport.providers import FALLBACK_HELP, PROVIDER_HELP, ProviderChoice
from headport.runtime.exact_option import EXACT, ExactChoice
from headport.runtime.generator import Generator
from headport.runtime.results import Stats
from headport.runtime.serve.limits import ServiceLimits
from headport.runtime.serve.prompts import check_prompts
from headport.tuned import THREADS_HELP

__all__ = ["SUMMARY", "Options", "run", "serve"]

SUMMARY = "Serve a bundle over HTTP, with the requests and answers of the OpenAI API."


class Options(OptionRecord, frozen=True):
    """Options of `headport serve`."""

    bundle: Annotated[Path, positional("the bundle's folder")]
    host: Annotated[
        str, option("address to listen on; others than this machine's own are open")
    ] = "127.0.0.1"
    port: Annotated[int, option("0 = any free one")] = 8000
    name: Annotated[str | None, option("what clients call the model; else the folder's name")] = (
        None
    )
    slots: Annotated[
        int, option("requests worked on at once; 0 = as memory allows, at most 16")
    ] = 0
    max_context: Annotated[int, option("tokens of a prompt and its reply; 0 = the model's")] = 0
    max_new_tokens: Annotated[int, option("tokens of one reply, at most")] = 1024
    max_replies: Annotated[int, option("replies to one request, at most")] = 32
    max_waiting: Annotated[int, option("rows that may wait for a slot before one is refused")] = 256
    max_body_bytes: Annotated[int, option("bytes of one request, at most")] = 1 << 20
    timeout: Annotated[float, option("seconds for one request, waiting included")] = 300.0
    grace: Annotated[float, option("seconds that running requests have once it is to stop")] = 30.0
    prefill_chunk: Annotated[int, option("prompt tokens run before others get their turn")] = 64
    threads: Annotated[int, option(THREADS_HELP)] = 0
    provider: Annotated[ProviderChoice, option(PROVIDER_HELP)] = "auto"
    cpu_fallback: Annotated[bool, option(FALLBACK_HELP)] = False
    exact: Annotated[
        ExactChoice,
        option("tokens as the unquantised head gives them; see generate"),
    ] = "auto"
    ignore: Annotated[
        tuple[str, ...], option("fields of the bundle's generation_config to leave out")
    ] = ()


def serve(options: Options) -> Stats:
    """Serve until the process is told to stop.

    Returns:
        The generator's counts.

    Raises:
        HeadportError: As `Generator`.
        UsageError: If a limit is not above 0, the address cannot be listened on, or the bundle
            answers to features.
    """
    import uvicorn

    from headport.runtime.serve.app import build_app

    limits = ServiceLimits(
        body_bytes=options.max_body_bytes,
        new_tokens=options.max_new_tokens,
        replies=options.max_replies,
        seconds=options.timeout,
    )
    # Before the bundle is loaded, which takes longer than to find the port taken.
    with _listen(options.host, options.port) as listener:
        bundle = Bundle.open(options.bundle)
        check_prompts(bundle, "`headport serve`")
        generator = Generator(
            bundle,
            threads=options.threads,
            provider=options.provider,
            cpu_fallback=options.cpu_fallback,
            ignore=options.ignore,
            exact=EXACT[options.exact],
            max_context=options.max_context,
            reply_limit=options.max_new_tokens,
            slots=options.slots,
            prefill_chunk=options.prefill_chunk,
            max_waiting=options.max_waiting,
        )
        name = options.name or options.bundle.resolve().name
        config = uvicorn.Config(
            build_app(generator, name, limits),
            log_level="warning",
            timeout_graceful_shutdown=max(1, round(options.grace)),
        )
        host, port = listener.getsockname()[:2]
        where = f"[{host}]" if ":" in host else host
        stats = generator.stats
        say(
            f"{name} at http://{where}:{port}/v1, {stats.slots} slots of {stats.context} tokens; "
            "end it with Ctrl-C"
        )
        with _told_to_stop(), generator:
            uvicorn.Server(config).run(sockets=[listener])
        return generator.stats


@contextmanager
def _told_to_stop() -> Iterator[None]:
    """Being told to stop is how a service ends: no error, after what runs has had its time.

    The server does the waiting. Then it sends itself the signal again, for those who wait for it.
    """
    main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, signal.default_int_handler) if main else None
    try:
        yield
    except KeyboardInterrupt:
        pass
    finally:
        if main:
            signal.signal(signal.SIGTERM, before)


def run(options: Options) -> Outcome:
    """Serve, and tell what was done."""
    stats = serve(options)
    text = f"[{stats.requests} requests, {stats.new_tokens} tokens]"
    return Outcome(text, dataclasses.asdict(stats))


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        found = socket.socket(family, socket.SOCK_STREAM)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((host, port))
        found.listen()  # from here on clients wait for an answer, and are not turned away
    except (OSError, OverflowError) as error:
        raise UsageError(
            f"{host}:{port} cannot be listened on ({error}); choose another --host or --port"
        ) from error
    return found
