"""`headport generate`: continue a prompt on the terminal, token by token."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Annotated, Any, Literal

from headport.command import OptionRecord, Outcome, option, positional
from headport.progress import say
from headport.providers import FALLBACK_HELP, PROVIDER_HELP, ProviderChoice
from headport.runtime.generator import Generator
from headport.runtime.parameters import Options as Request
from headport.runtime.results import Generation

__all__ = ["SUMMARY", "Options", "generate", "run"]

SUMMARY = "Generate text from a bundle, streaming."


class Options(OptionRecord, frozen=True):
    """Options of `headport generate`; None leaves the choice to the bundle."""

    bundle: Annotated[Path, positional("the bundle's folder")]
    prompt: Annotated[str, option("text to continue", flag="-p", metavar="TEXT")]
    chat: Annotated[bool, option("the prompt is a user's message; use the chat template")] = False
    max_new_tokens: Annotated[int | None, option("most new tokens")] = None
    temperature: Annotated[float | None, option("0 is greedy")] = None
    top_k: Annotated[int | None, option("most likely tokens kept; 0 is off")] = None
    top_p: Annotated[float | None, option("mass of the tokens kept; 1 is off")] = None
    min_p: Annotated[float | None, option("least share of the top probability; 0 is off")] = None
    seed: Annotated[int | None, option("key of the noise; drawn where not given")] = None
    exact: Annotated[
        Literal["auto", "always", "never"],
        option(
            "tokens as the unquantised head gives them: where the head is certified, "
            "or refuse others, or leave unproved tokens as they are"
        ),
    ] = "auto"
    threads: Annotated[int, option("ONNX Runtime threads, 0 = all available cores")] = 0
    provider: Annotated[ProviderChoice, option(PROVIDER_HELP)] = "auto"
    cpu_fallback: Annotated[bool, option(FALLBACK_HELP)] = False
    ignore: Annotated[
        tuple[str, ...], option("fields of the bundle's generation_config to leave out")
    ] = ()


_EXACT = {"auto": None, "always": True, "never": False}


def generate(options: Options) -> tuple[Generation, dict[str, Any]]:
    """Continue one prompt, saying each part of the text as it comes.

    Returns:
        The reply; and what was measured: `seconds` without loading, `tokens_per_second` of the
        tokens after the first, and the generator's `stats`.

    Raises:
        HeadportError: As `Generator` and `Generator.stream`.
    """
    generator = Generator(
        options.bundle,
        threads=options.threads,
        provider=options.provider,
        cpu_fallback=options.cpu_fallback,
        ignore=options.ignore,
        exact=_EXACT[options.exact],
    )
    prompt: str | list[int] = options.prompt
    if options.chat:
        prompt = generator.chat_ids([{"role": "user", "content": options.prompt}])
    names = Request.__annotations__.keys() & set(options.__struct_fields__)
    given = {name: v for name in names if (v := getattr(options, name)) is not None}
    start = first = time.perf_counter()
    stream = generator.stream(prompt, **given)
    for token in stream:
        if token.step == 0:
            first = time.perf_counter()
        say(token.text, end="")
    end = time.perf_counter()
    say("")
    reply = stream.generation
    later = len(reply.token_ids) - 1
    return reply, {
        "seconds": end - start,
        "tokens_per_second": later / (end - first) if later else None,
        "stats": dataclasses.asdict(generator.stats),
    }


def run(options: Options) -> Outcome:
    """Generate, and tell how it ended."""
    reply, measured = generate(options)
    seed = "" if reply.seed is None else f", seed {reply.seed}"
    text = f"[{len(reply.token_ids)} tokens, ended by {reply.finish_reason}{seed}]"
    return Outcome(text, dataclasses.asdict(reply) | measured)
