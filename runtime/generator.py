"""`Generator`: a bundle that answers."""

from __future__ import annotations

import copy
import secrets
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import numpy.typing as npt

from headport.bundle import Bundle
from headport.certificate_check import require_certificate
from headport.errors import BundleError, PromptError, RequestError
from headport.providers import AUTO
from headport.runner import Runner, open_runner
from headport.runtime.chat import chat_ids
from headport.runtime.decoding import Decoder
from headport.runtime.generation_config import read_defaults
from headport.runtime.parameters import Options, Request, check_ids, resolve
from headport.runtime.prompts import Prompt, fit, read_prompts
from headport.runtime.results import Generation, Score, Stats, Token
from headport.runtime.row import Row
from headport.runtime.sampling.chooser import make_chooser
from headport.runtime.scoring import logits_of, score_of
from headport.runtime.text import TextStream, Tokens
from headport.runtime.vocabulary import IdMap
from headport.session import SessionSettings

__all__ = ["Generator", "TokenStream"]

_HEAD = "lm"
_SEED_BITS = 53  # drawn seeds survive JSON readers that know only float64


class Generator:
    """Runs a bundle, portable or lowered. All ids it takes and gives are original ids.

    Args:
        bundle: The bundle's folder, or an opened bundle.
        threads: ONNX Runtime's threads; 0 = one per available core.
        provider: Where it runs: `cpu`, `cuda`, or `auto`, what the bundle was lowered for.
        cpu_fallback: Operators that the provider lacks run on the CPU, named on the terminal; else
            the bundle is refused.
        verify: Compare the checksum of every file first; False checks presence and size. Applies
            where `bundle` is a folder.
        max_context: Tokens that a prompt and its reply may have together; 0 = the model's own
            limit.
        ignore: Fields of the bundle's generation_config to leave out, supported or not.
        exact: For a head that gives candidates. True: every token is the one that the original,
            unquantised head would give; what the candidates do not prove takes the full product
            and is counted. False: what is not proved is chosen from the rescored quantised
            logits. None: True where the head is certified.
        runner: Executes the bundle in place of sessions opened here.

    Raises:
        BundleError: If the bundle is damaged, has no head `lm`, or its generation_config asks for
            something that changes tokens and is not supported; if `exact` is asked for and the
            head has no certificate, or its certificate does not hold on this machine.
        UsageError: If the provider is unknown, does not work here, or cannot run the bundle.
        RequestError: If `max_context` exceeds the model's.
    """

    def __init__(
        self,
        bundle: str | Path | Bundle,
        *,
        threads: int = 0,
        provider: str = AUTO,
        cpu_fallback: bool = False,
        verify: bool = True,
        max_context: int = 0,
        ignore: Collection[str] = (),
        exact: bool | None = None,
        runner: Runner | None = None,
    ) -> None:
        opened = bundle if isinstance(bundle, Bundle) else Bundle.open(bundle, verify=verify)
        manifest = opened.manifest
        if _HEAD not in manifest.heads:
            known = ", ".join(manifest.heads) or "none"
            raise BundleError(f"{opened.path}: no head {_HEAD!r} to generate with (heads: {known})")
        if not 0 <= max_context <= manifest.model.max_context:
            raise RequestError(
                f"max_context must be from 1 to the model's {manifest.model.max_context}, "
                f"{max_context} was given"
            )
        self.bundle = opened
        self.max_context = max_context or manifest.model.max_context
        self._defaults = read_defaults(manifest.defaults, ignore)
        self._ids = IdMap.from_bundle(opened)
        found = self._defaults
        check_ids(found.sampling, found.eos_token_ids, self._ids.size, BundleError)
        self._tokens = Tokens(opened)
        settings = SessionSettings(threads, provider, cpu_fallback)
        self._runner = runner or open_runner(opened, settings, (_HEAD,))
        self._stats = Stats()
        form = manifest.heads[_HEAD].candidates
        self.exact = bool(form and form.certified) if exact is None else exact
        if self.exact:
            require_certificate(opened, self._runner, _HEAD, given=runner is not None)
        head = manifest.heads[_HEAD]
        chooser = make_chooser(self._runner, _HEAD, head, self._ids, self._stats, exact=self.exact)
        self._decoder = Decoder(self._runner, self._stats, chooser)

    @property
    def stats(self) -> Stats:
        """A copy of the counts since the generator was made."""
        return copy.deepcopy(self._stats)

    def generate(
        self, prompts: Prompt | Sequence[Prompt], **options: Unpack[Options]
    ) -> list[Generation]:
        """Continue prompts, all in one batch: one backbone run per step.

        A row's tokens depend on its prompt, its seed and the options, not on its batch mates. One
        `seed` serves all prompts of the call, so equal prompts then get equal replies; without a
        seed each prompt draws its own.

        Args:
            prompts: Texts or id lists, or one of them.
            **options: See `Options`.

        Returns:
            One reply per prompt, in order.

        Raises:
            PromptError: If a prompt is empty, holds unknown ids, or does not fit the context.
            RequestError: If an option is unknown or out of range.
            NonFiniteError: If the bundle gives logits that are not finite.
        """
        rows = self._rows(prompts, options, watched=False)
        for _ in self._decoder.run(rows):
            pass
        return [_generation(row) for row in rows]

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> TokenStream:
        """Continue one prompt and hand out each token as it comes.

        Checks are made at once, not at the first token.

        Args:
            prompt: A text or an id list.
            **options: See `Options`.

        Raises:
            PromptError: As `generate`.
            RequestError: As `generate`.
        """
        [row] = self._rows([prompt], options, watched=True)
        return TokenStream(self._decoder, row)

    def chat_ids(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> list[int]:
        """Token ids of a conversation by the bundle's chat template: a prompt for `generate`.

        Args:
            messages: Mappings with `role` and `content`, oldest first.
            **variables: More names the template may read, such as `tools`.

        Raises:
            BundleError: If the bundle has no usable chat template.
            RequestError: If the template refuses the messages.
        """
        return chat_ids(self.bundle, self._tokens, messages, variables)

    def logits(self, token_ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """Raw logits after each token: no temperature, no filter.

        Args:
            token_ids: Original ids, [T].

        Returns:
            float32 [T, V]; -inf where an id was pruned.

        Raises:
            PromptError: If there are none, or unknown ones, or more than the context holds.
        """
        ids = self._checked(token_ids)
        return logits_of(ids, self._runner, _HEAD, self._ids)

    def score(self, texts: Prompt | Sequence[Prompt]) -> list[Score]:
        """Negative log-likelihood of each token of each text, one text at a time.

        Args:
            texts: Texts or id lists, or one of them, each within the context.

        Raises:
            PromptError: As `logits`.
        """
        found = read_prompts(texts, self._tokens, self._ids.size)
        return [score_of(self._checked(ids), self._runner, _HEAD, self._ids) for ids in found]

    def _checked(self, token_ids: Sequence[int]) -> list[int]:
        [ids] = read_prompts([token_ids], self._tokens, self._ids.size)
        if len(ids) > self.max_context:
            raise PromptError(
                f"{len(ids)} tokens were given, but the context holds {self.max_context}; "
                "cut the text into windows"
            )
        return ids

    def _rows(
        self, prompts: Prompt | Sequence[Prompt], options: Options, *, watched: bool
    ) -> list[Row]:
        ids = read_prompts(prompts, self._tokens, self._ids.size)
        request = resolve(options, self._defaults, len(ids))
        check_ids(request.sampling, request.eos_token_ids, self._ids.size, RequestError)
        limits = fit(ids, request, self.max_context)
        self._stats.requests += 1
        return [
            Row(
                index=n,
                prompt_token_ids=prompt,
                parameters=request.parameters(limits[n]),
                seed=seed,
                text=TextStream(self._tokens, request.stop),
                watched=watched or bool(request.stop),
                sample=sample,
            )
            for n, prompt in enumerate(ids)
            for sample, seed in enumerate([_seed(request, n)] * request.n)
        ]


class TokenStream(Iterator[Token]):
    """The tokens of one reply as they come. `generation` is there once it has ended."""

    def __init__(self, decoder: Decoder, row: Row) -> None:
        self._row = row
        self._steps = decoder.run([row])

    @property
    def seed(self) -> int | None:
        """As `Generation.seed`, from the start."""
        return self._row.seed

    def __next__(self) -> Token:
        [token] = next(self._steps)
        assert token is not None
        return token

    @property
    def generation(self) -> Generation:
        """The whole reply.

        Raises:
            RequestError: If the stream has not ended.
        """
        if self._row.finish_reason is None:
            raise RequestError("the stream has not ended; take its remaining tokens first")
        return _generation(self._row)


def _seed(request: Request, index: int) -> int | None:
    if request.seeds is not None:
        return request.seeds[index]
    return secrets.randbits(_SEED_BITS) if request.sampling.temperature > 0.0 else None


def _generation(row: Row) -> Generation:
    assert row.finish_reason is not None
    return Generation(
        text=row.text.text,
        token_ids=row.token_ids,
        finish_reason=row.finish_reason,
        seed=row.seed,
        prompt_token_ids=row.prompt_token_ids,
        parameters=row.parameters,
        index=row.index,
        sample=row.sample,
        logprobs=row.logprobs,
    )
