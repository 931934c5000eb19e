"""`Generator`: a bundle that answers."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Unpack

from headport.bundle import Bundle
from headport.certificate_check import require_certificate
from headport.condition import open_conditions
from headport.errors import BundleError, RequestError
from headport.machine import usable_cpus
from headport.providers import AUTO, find_provider
from headport.runner import Runner, open_runner
from headport.runtime.conditions import Condition, ConditionedChooser, read_vectors
from headport.runtime.decoder_start import START_FIELDS
from headport.runtime.generation_config import Defaults, read_defaults
from headport.runtime.given import GivenTokens
from headport.runtime.inputs import Input, open_inputs
from headport.runtime.parameters import Options, check_ids, resolve
from headport.runtime.prompts import Prompt, fit
from headport.runtime.replies import RowMaker, beam_steps, check_streamed, replies_of
from headport.runtime.results import Generation, Stats
from headport.runtime.sampling.chooser import make_chooser
from headport.runtime.scheduling.capacity import (
    available_bytes,
    check_beams,
    choose_slots,
    slot_bytes,
)
from headport.runtime.scheduling.scheduler import Scheduler
from headport.runtime.scheduling.sequences import Listener
from headport.runtime.scheduling.tickets import deadline_of
from headport.runtime.scheduling.worker import Worker
from headport.runtime.scoring import Scorer
from headport.runtime.submission import Submission, TokenStream
from headport.runtime.text import Tokens
from headport.runtime.vocabulary import IdMap
from headport.session import SessionSettings
from headport.slots import open_slots
from headport.tuned import settings_of

__all__ = ["Generator"]


class Generator(GivenTokens):
    """Runs a bundle, portable or lowered. All ids it takes and gives are original ids.

    One generator serves any number of threads. All requests share its sessions and its caches:
    requests join and leave between steps, and every step runs the backbone once for all of them.

    Args:
        bundle: The bundle's folder, or an opened bundle.
        threads: ONNX Runtime's threads; 0 = as the bundle records for this kind of machine
            (`headport tune`), else one per available core.
        provider: Where it runs: `cpu`, `cuda`, or `auto`, what the bundle was lowered for.
        cpu_fallback: Operators that the provider lacks run on the CPU, named on the terminal; else
            the bundle is refused.
        verify: Compare the checksum of every file first; False checks presence and size. Applies
            where `bundle` is a folder.
        max_context: Tokens that a prompt and its reply may have together; 0 = the model's own
            limit.
        reply_limit: Most new tokens of a reply whose call names no number; 0 = as the bundle says.
        ignore: Fields of the bundle's generation_config to leave out, supported or not.
        exact: For a head that gives candidates. True: every token is the one that the original,
            unquantised head would give; what the candidates do not prove takes the full product
            and is counted. False: what is not proved is chosen from the rescored quantised
            logits. None: True where the head is certified.
        head: The head that tokens are chosen with.
        more_heads: Heads that `outputs` may be asked for besides.
        slots: Rows that are worked on at once, each with a cache of `max_context` tokens; others
            wait. 0 = 16, or as many as half of the available memory holds, at least one.
        prefill_chunk: Prompt tokens per backbone run: how long a prompt holds up the others. Float
            results depend on it a little, as on the shape of any matrix product.
        prefix_reuse: Take over the caches of whole chunks that an earlier prompt began with. They
            are the ones that would be computed again, bit for bit.
        max_waiting: Rows that may wait for a slot before requests are refused.
        runner: Executes the bundle in place of sessions opened here.

    Raises:
        BundleError: If the bundle is damaged, lacks a head, or its generation_config asks for
            something that changes tokens and is not supported; if `exact` is asked for and the
            head has no certificate, or its certificate does not hold on this machine.
        UsageError: If the provider is unknown, does not work here, or cannot run the bundle.
        RequestError: If `max_context` exceeds the model's, `slots` do not fit in memory, or another
            number is out of range.
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
        reply_limit: int = 0,
        ignore: Collection[str] = (),
        exact: bool | None = None,
        head: str = "lm",
        more_heads: Collection[str] = (),
        slots: int = 0,
        prefill_chunk: int = 64,
        prefix_reuse: bool = True,
        max_waiting: int = 1024,
        runner: Runner | None = None,
    ) -> None:
        opened = bundle if isinstance(bundle, Bundle) else Bundle.open(bundle, verify=verify)
        manifest = opened.manifest
        missing = [name for name in (head, *more_heads) if name not in manifest.heads]
        if missing:
            known = ", ".join(manifest.heads) or "none"
            raise BundleError(f"{opened.path}: no head {missing[0]!r} in it (heads: {known})")
        if not 0 <= max_context <= manifest.model.max_context:
            raise RequestError(
                f"max_context must be from 1 to the model's {manifest.model.max_context}, "
                f"{max_context} was given"
            )
        least = (("prefill_chunk", prefill_chunk, 1), ("max_waiting", max_waiting, 1))
        for name, value, low in (*least, ("reply_limit", reply_limit, 0)):
            if value < low:
                raise RequestError(f"{name} must be from {low} up, {value} was given")
        self.bundle = opened
        self.head = head
        self._reply_limit = reply_limit
        self.max_context = max_context or manifest.model.max_context
        own = frozenset() if manifest.source is None else START_FIELDS
        self._defaults = read_defaults(
            {k: v for k, v in manifest.defaults.items() if k not in own}, ignore
        )
        self._ids = IdMap.from_bundle(opened)
        check_ids(
            self._defaults.sampling, self._defaults.eos_token_ids, self._ids.size, BundleError
        )
        self._tokens = Tokens(opened)
        settings = settings_of(manifest, SessionSettings(threads, provider, cpu_fallback))
        each = slot_bytes(opened, self.max_context)
        self._device = find_provider(settings.provider).device
        available = available_bytes(self._device)
        count = choose_slots(slots, each, self.max_context, available)
        heads = tuple(dict.fromkeys((head, *more_heads)))
        self._runner = runner or open_runner(opened, settings, heads)
        form = manifest.heads[head].candidates
        self.exact = bool(form and form.certified) if exact is None else exact
        if self.exact:
            require_certificate(opened, self._runner, head, given=runner is not None)
        self._stats = Stats(slots=count, context=self.max_context, prefill_chunk=prefill_chunk)
        if runner is None:
            self._stats.threads = settings.threads or usable_cpus()
            self._stats.spinning = settings.spinning and self._stats.threads > 1
            self._stats.tuned = threads == 0 and settings.threads > 0
        self._inputs = open_inputs(opened, self._runner, self._tokens, self._stats, ignore)
        self._conditions = open_conditions(opened)
        chooser = make_chooser(
            self._runner, head, manifest.heads[head], self._ids, self._stats, exact=self.exact
        )
        self._chooser = chooser if self._conditions is None else ConditionedChooser(chooser)
        self._scorer = Scorer(self._runner, self._ids, prefill_chunk)
        worker = Worker(
            partial(open_slots, self._runner, count, self.max_context),
            count=count,
            chunk=prefill_chunk,
            # What a decoder's tokens were computed from includes their source.
            reuse=prefix_reuse and manifest.source is None,
            chooser=self._chooser,
            stats=self._stats,
        )
        # Neither holds the generator, so that one which nobody holds any more is closed.
        self._scheduler = Scheduler(worker, max_waiting, self._stats)
        self._ending = weakref.finalize(self, self._scheduler.close)

    @property
    def heads(self) -> tuple[str, ...]:
        """Names of the bundle's heads."""
        return tuple(self.bundle.manifest.heads)

    @property
    def defaults(self) -> Defaults:
        """What holds where a call says nothing."""
        return self._defaults

    @property
    def stats(self) -> Stats:
        """A copy of the counts since the generator was made."""
        return self._scheduler.between_steps(partial(copy.deepcopy, self._stats))

    @property
    def closed(self) -> bool:
        """Whether it takes no more requests."""
        return self._scheduler.closed

    def close(self) -> None:
        """End all requests, with `ClosedError`, and the thread that works on them."""
        self._scheduler.close()

    def __enter__(self) -> Generator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def generate(
        self,
        prompts: Input | Sequence[Input],
        *,
        prefix: Prompt | None = None,
        condition: Condition | Sequence[Condition | None] | None = None,
        timeout: float | None = None,
        **options: Unpack[Options],
    ) -> list[Generation]:
        """Continue prompts and wait for the replies.

        A row's tokens depend on its prompt, its seed and the options, not on what runs with it. One
        `seed` serves all prompts of the call, so equal prompts then get equal replies; without a
        seed each prompt draws its own.

        Args:
            prompts: Texts or id lists, or one of them, or `Parts`, which hold rows of embeddings
                too; of an encoder-decoder bundle its sources, which are float arrays [F, frames]
                where the model reads features.
            prefix: Of an encoder-decoder bundle: what every reply begins with, as text or ids.
                It counts to the prompt, not to the new tokens; None = as the bundle says.
            condition: Of a bundle with conditions: a stored name or values [C] for all prompts, or
                a list of one or None for each; None = nothing is added to hidden states.
            timeout: Seconds from now, waiting for a slot included; None = no limit.
            **options: See `Options`.

        Returns:
            The replies of each prompt, in order: one, or `n`.

        Raises:
            PromptError: If a prompt is empty, holds unknown ids, or does not fit the context.
            RequestError: If an option is unknown or out of range.
            NonFiniteError: If the bundle gives logits that are not finite.
            DeadlineError: If the time is over.
            OverloadedError: If too many rows wait already.
            ClosedError: If the generator is closed.
        """
        make = partial(self.submit, prompts, prefix=prefix, condition=condition, timeout=timeout)
        return make(**options).result()

    def stream(
        self,
        prompt: Input,
        *,
        prefix: Prompt | None = None,
        condition: Condition | Sequence[Condition | None] | None = None,
        timeout: float | None = None,
        **options: Unpack[Options],
    ) -> TokenStream:
        """Continue one prompt and hand out each token as it comes.

        Checks are made at once, not at the first token.

        Args:
            prompt: A text or an id list, or as `generate` takes it.
            prefix: As `generate`.
            condition: As `generate`.
            timeout: As `generate`.
            **options: See `Options`; one reply, no beams.

        Raises:
            HeadportError: As `generate`; what comes up while it runs is raised by the stream.
        """
        make = partial(self.submit, [prompt], prefix=prefix, condition=condition, timeout=timeout)
        return TokenStream(partial(make, single=True, **options))

    def submit(
        self,
        prompts: Input | Sequence[Input],
        *,
        prefix: Prompt | None = None,
        condition: Condition | Sequence[Condition | None] | None = None,
        listener: Listener | None = None,
        timeout: float | None = None,
        single: bool = False,
        **options: Unpack[Options],
    ) -> Submission:
        """Hand over a request and go on.

        Args:
            prompts: As `generate`.
            prefix: As `generate`.
            condition: As `generate`.
            listener: Called with every token, and the place of its reply among all of the request,
                in the thread that does the work: it must be quick, and wait for nothing.
            timeout: As `generate`.
            single: Refuse what has more than one reply, or none before its end.
            **options: See `Options`.

        Raises:
            HeadportError: As `generate`, what is found before anything runs.
        """
        deadline = deadline_of(timeout)
        given = self._inputs.read(prompts, prefix)
        ids = [each.token_ids for each in given]
        request = resolve(options, self._defaults, len(ids))
        check_ids(request.sampling, request.eos_token_ids, self._ids.size, RequestError)
        limits = fit(ids, request, self.max_context, self._reply_limit)
        if single:
            check_streamed(request)
        maker = RowMaker(
            request,
            ids,
            limits,
            self._tokens,
            watched=listener is not None,
            sources=[each.source for each in given],
            conditions=read_vectors(condition, self._conditions, len(ids), self._stats),
        )
        if request.beams.num_beams > 1:
            if listener is not None:
                raise RequestError("beams have no tokens before their end; leave the listener out")
            longest = max(len(each) + limit for each, limit in zip(ids, limits, strict=True))
            check_beams(self.bundle, request.beams.num_beams, longest, self._device)
            searches = maker.searches(
                self._runner, self._chooser, self._ids.ids, self._scorer.chunk
            )
            ticket = self._scheduler.submit_job(beam_steps(searches), deadline, counted=True)
            seeds: list[int | None] = [None] * len(ids)
        else:
            rows = maker.rows()
            ticket = self._scheduler.submit(rows, listener, deadline)
            seeds = [row.seed for row in rows]
        return Submission(ticket, partial(replies_of, rerank=request.rerank), seeds, self)
