"""`headport generate`: continue a prompt on the terminal, token by token."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Annotated, Any, Literal

from headport.command import OptionRecord, Outcome, option, positional
from headport.progress import say
from headport.providers import FALLBACK_HELP, PROVIDER_HELP, ProviderChoice
from headport.runtime.command_input import read_input
from headport.runtime.exact_option import EXACT, ExactChoice
from headport.runtime.generator import Generator
from headport.runtime.inputs import Input
from headport.runtime.parameters import Options as Request
from headport.runtime.results import Generation
from headport.runtime.scheduling.capacity import MOST_SLOTS
from headport.tuned import THREADS_HELP

__all__ = ["SUMMARY", "Options", "generate", "run"]

SUMMARY = "Generate text from a bundle, streaming."


class Options(OptionRecord, frozen=True):
    """Options of `headport generate`; None leaves the choice to the bundle."""

    bundle: Annotated[Path, positional("the bundle's folder")]
    prompt: Annotated[str | None, option("text to continue", flag="-p", metavar="TEXT")] = None
    source: Annotated[
        str | None,
        option(
            "of an encoder-decoder model: text to answer to; -p is then what the reply begins with",
            metavar="TEXT",
        ),
    ] = None
    features: Annotated[
        Path | None,
        option("the same of one that reads features: float [F, frames] in a .npy file"),
    ] = None
    condition: Annotated[
        str | None, option("of a bundle with conditions: name of a stored one", metavar="NAME")
    ] = None
    chat: Annotated[bool, option("the prompt is a user's message; use the chat template")] = False
    max_new_tokens: Annotated[int | None, option("most new tokens")] = None
    temperature: Annotated[float | None, option("0 is greedy")] = None
    top_k: Annotated[int | None, option("most likely tokens kept; 0 is off")] = None
    top_p: Annotated[float | None, option("mass of the tokens kept; 1 is off")] = None
    min_p: Annotated[float | None, option("least share of the top probability; 0 is off")] = None
    typical_p: Annotated[float | None, option("mass of the least surprising; 1 is off")] = None
    epsilon_cutoff: Annotated[float | None, option("least probability; 0 is off")] = None
    eta_cutoff: Annotated[float | None, option("the same, less where unsure; 0 is off")] = None
    repetition_penalty: Annotated[
        float | None, option("of tokens in the prompt and the reply; 1 is off")
    ] = None
    presence_penalty: Annotated[float | None, option("of tokens in the reply; 0 is off")] = None
    frequency_penalty: Annotated[
        float | None, option("per time that a token stands in the reply; 0 is off")
    ] = None
    no_repeat_ngram_size: Annotated[
        int | None, option("tokens in a row that never come twice; 0 is off")
    ] = None
    suppress_tokens: Annotated[
        tuple[int, ...] | None, option("token ids that are never chosen")
    ] = None
    min_new_tokens: Annotated[int | None, option("no end token before; 0 is off")] = None
    stop: Annotated[tuple[str, ...] | None, option("texts that end the reply")] = None
    n: Annotated[int | None, option("replies: samples, or the best beams")] = None
    num_beams: Annotated[int | None, option("beams of a beam search; 1 is none")] = None
    length_penalty: Annotated[float | None, option("of beams: above 0 favours longer replies")] = (
        None
    )
    early_stopping: Annotated[
        Literal["no", "yes", "never"] | None,
        option("of beams: end when enough are complete; never: only when no other can be better"),
    ] = None
    logprobs: Annotated[
        int | None, option("with --json: likelihoods of each token and of so many others")
    ] = None
    seed: Annotated[int | None, option("key of the noise; drawn where not given")] = None
    exact: Annotated[
        ExactChoice,
        option(
            "tokens as the unquantised head gives them: where the head is certified, "
            "or refuse others, or leave unproved tokens as they are"
        ),
    ] = "auto"
    threads: Annotated[int, option(THREADS_HELP)] = 0
    provider: Annotated[ProviderChoice, option(PROVIDER_HELP)] = "auto"
    cpu_fallback: Annotated[bool, option(FALLBACK_HELP)] = False
    ignore: Annotated[
        tuple[str, ...], option("fields of the bundle's generation_config to leave out")
    ] = ()


_EARLY = {None: None, "no": False, "yes": True, "never": "never"}


def generate(options: Options) -> tuple[list[Generation], dict[str, Any]]:
    """Continue one prompt. One reply is said part by part as it comes, several when all are there.

    Returns:
        The replies; and what was measured: `seconds` without loading, `tokens_per_second` of the
        tokens after the first of a single reply, and the generator's `stats`.

    Raises:
        UsageError: If what is to be continued or answered does not go with the bundle.
        HeadportError: As `Generator`, `Generator.stream` and `Generator.generate`.
    """
    generator = Generator(
        options.bundle,
        threads=options.threads,
        provider=options.provider,
        cpu_fallback=options.cpu_fallback,
        ignore=options.ignore,
        exact=EXACT[options.exact],
        slots=min(max(1, options.n or 1), MOST_SLOTS),
    )
    prompt, prefix = read_input(options, generator)
    names = Request.__annotations__.keys() & set(options.__struct_fields__)
    given: dict[str, Any] = {name: getattr(options, name) for name in names}
    given["condition"] = options.condition
    given["early_stopping"] = _EARLY[options.early_stopping]
    defaults = generator.defaults
    single = max(options.n or defaults.n, options.num_beams or defaults.beams.num_beams) == 1
    start = time.perf_counter()
    replies, speed = _streamed(generator, prompt, prefix, given) if single else (None, None)
    if replies is None:
        replies = generator.generate([prompt], prefix=prefix, **given)
        for n, reply in enumerate(replies):
            score = "" if reply.score is None else f", score {reply.score:.4f}"
            say(f"[{n + 1}{score}] {reply.text}")
    return replies, {
        "seconds": time.perf_counter() - start,
        "tokens_per_second": speed,
        "stats": dataclasses.asdict(generator.stats),
    }


def _streamed(
    generator: Generator, prompt: Input, prefix: str | None, given: dict[str, Any]
) -> tuple[list[Generation], float | None]:
    first = 0.0
    stream = generator.stream(prompt, prefix=prefix, **given)
    for token in stream:
        if token.step == 0:
            first = time.perf_counter()
        say(token.text, end="")
    end = time.perf_counter()
    say("")
    later = len(stream.generation.token_ids) - 1
    return [stream.generation], later / (end - first) if later else None


def run(options: Options) -> Outcome:
    """Generate, and tell how it ended."""
    replies, measured = generate(options)
    lines = []
    for reply in replies:
        seed = "" if reply.seed is None else f", seed {reply.seed}"
        lines.append(f"[{len(reply.token_ids)} tokens, ended by {reply.finish_reason}{seed}]")
    several: dict[str, Any] = {"replies": [dataclasses.asdict(reply) for reply in replies]}
    document = several["replies"][0] if len(replies) == 1 else several
    return Outcome("\n".join(lines), document | measured)
