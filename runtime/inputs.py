"""What a call gives a bundle to go on: prompts of a decoder-only model, sources of another.

Both kinds end as the tokens that a reply continues, and where there is an encoder as a source that
these tokens' rows read.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from headport.bundle import Bundle
from headport.cache_ports import FEATURES
from headport.errors import BundleError, PromptError, RequestError
from headport.given_rows import GivenRows
from headport.manifest import Source
from headport.runner import Runner
from headport.runtime.decoder_start import DecoderStart, read_start
from headport.runtime.parts import Parts, read_parts
from headport.runtime.prompts import Prompt, read_prompts
from headport.runtime.results import Stats
from headport.runtime.sources import ReadSource
from headport.runtime.text import Tokens
from headport.session_runner import SessionRunner
from headport.source_encoder import SourceEncoder, encoder_name

__all__ = ["Given", "Input", "Inputs", "open_inputs"]

Array = npt.NDArray[Any]
Input = Prompt | Array | Parts


@dataclass(frozen=True)
class Given:
    """One input of a call."""

    token_ids: list[int]  # what a reply continues; below 0 they stand for rows of embeddings
    source: ReadSource | None = None


class Inputs(Protocol):
    """Reads what a call gives."""

    def read(self, given: Any, prefix: Prompt | None) -> list[Given]:
        """The inputs of a call, in order.

        Args:
            given: One input or several.
            prefix: Begin of every reply; None: as the bundle says.

        Raises:
            PromptError: Naming every input that cannot be read.
            RequestError: If a prefix is given and there is no use for it.
        """
        ...

    def tokens_of(self, given: Any) -> list[int]:
        """Ids of tokens that are given; below 0 they stand for rows of embeddings.

        Raises:
            PromptError: If they cannot be read.
        """
        ...

    def source(self, given: Any) -> ReadSource | None:
        """A source for tokens that are given.

        Raises:
            PromptError: If there must be one and is none, or it cannot be read.
            RequestError: If there is no use for one.
        """
        ...


def open_inputs(
    bundle: Bundle, runner: Runner, tokens: Tokens, stats: Stats, ignore: Collection[str]
) -> Inputs:
    """What reads the inputs of a bundle.

    Raises:
        BundleError: If a decoder's start is not stated, or the runner has no encoder for it.
    """
    manifest = bundle.manifest
    if manifest.source is None:
        rows = runner.given if isinstance(runner, SessionRunner) else None
        return _Prompts(tokens, manifest.vocabulary.size, rows)
    encoder = runner.encoder if isinstance(runner, SessionRunner) else None
    if encoder is None:
        raise BundleError(
            f"{bundle.path}: an encoder-decoder bundle, and its runner has no encoder"
        )
    start = read_start(manifest.defaults, ignore)
    shape: tuple[int, ...] = ()
    if manifest.source.vocab_size is None:
        ports = manifest.graphs[encoder_name(manifest)].inputs
        [dims] = [port.shape[1:] for port in ports if port.name == FEATURES]
        shape = tuple(int(dim) for dim in dims)
    return _Sources(tokens, manifest.vocabulary.size, manifest.source, shape, start, encoder, stats)


@dataclass(frozen=True)
class _Prompts:
    """Of a decoder-only bundle."""

    tokens: Tokens
    size: int
    rows: GivenRows | None  # of embeddings

    def read(self, given: Any, prefix: Prompt | None) -> list[Given]:
        if prefix is not None:
            raise RequestError(
                "prefix is for bundles of encoder-decoder models; put what a reply begins with at "
                "the end of the prompt"
            )
        if isinstance(given, Parts):
            return [Given(self._ids(given, 0))]
        if isinstance(given, list | tuple) and any(isinstance(each, Parts) for each in given):
            return [Given(self._ids(each, n)) for n, each in enumerate(given)]
        return [Given(ids) for ids in read_prompts(given, self.tokens, self.size)]

    def tokens_of(self, given: Any) -> list[int]:
        return self._ids(given, 0)

    def _ids(self, given: Any, number: int) -> list[int]:
        if isinstance(given, Parts):
            try:
                return read_parts(given, self.tokens, self.size, self.rows)
            except PromptError as error:
                raise PromptError(f"prompt {number}: {error}") from error
        [ids] = read_prompts([given], self.tokens, self.size, first=number)
        return ids

    def source(self, given: Any) -> ReadSource | None:
        if given is not None:
            raise RequestError("this bundle reads no source: it is no encoder-decoder model")
        return None


@dataclass(frozen=True)
class _Sources:
    """Of an encoder-decoder bundle."""

    tokens: Tokens
    size: int
    declared: Source
    shape: tuple[int, ...]  # of features; () where it reads ids
    start: DecoderStart
    encoder: SourceEncoder
    stats: Stats

    def read(self, given: Any, prefix: Prompt | None) -> list[Given]:
        ids = None
        if isinstance(prefix, str):
            ids = self.tokens.encode(prefix, add_special_tokens=False)
        elif prefix is not None and len(prefix):
            [ids] = read_prompts([prefix], self.tokens, self.size, "prefix")
        elif prefix is not None:
            ids = []
        prompt = self.start.prompt(ids)
        return [Given(list(prompt), self._source(values)) for values in self._values(given)]

    def tokens_of(self, given: Any) -> list[int]:
        [ids] = read_prompts([given], self.tokens, self.size)
        return ids

    def source(self, given: Any) -> ReadSource | None:
        if given is None:
            raise PromptError(
                "an encoder-decoder bundle says nothing of tokens alone; give the source they "
                "answer to as source"
            )
        [values] = self._values([given])
        return self._source(values)

    def _source(self, values: Array) -> ReadSource:
        return ReadSource(values, self.encoder, self.stats)

    def _values(self, given: Any) -> list[Array]:
        if self.shape:
            return _features(given, self.shape)
        found = read_prompts(given, self.tokens, self.size, "source")
        most = self.declared.max_length
        faults = [
            f"source {n} has {len(ids)} tokens, the encoder holds {most}"
            for n, ids in enumerate(found)
            if most is not None and len(ids) > most
        ]
        if faults:
            raise PromptError("; ".join(faults) + "; shorten it, or cut it into parts")
        return [np.array(ids, np.int64) for ids in found]


def _features(given: Any, shape: tuple[int, ...]) -> list[Array]:
    """Features [F, frames] each, of one array, several, or one array of several."""
    wanted = f"input features, float {list(shape)} as the model's feature extractor gives them"
    if isinstance(given, np.ndarray):
        several: Sequence[Any] = [given] if given.ndim == len(shape) else list(given)
    elif isinstance(given, Sequence) and not isinstance(given, str):
        several = list(given)
    else:
        several = [given]
    if not several:
        raise PromptError(f"at least one source was expected, none was given; {wanted}")
    faults = []
    for n, each in enumerate(several):
        if not isinstance(each, np.ndarray) or each.dtype.kind != "f":
            kind = each.dtype if isinstance(each, np.ndarray) else type(each).__name__
            faults.append(f"source {n} is {kind}, {wanted}, were expected")
        elif each.shape != shape:
            faults.append(f"source {n} is {list(each.shape)}, {wanted}, were expected")
        elif not np.isfinite(each).all():
            faults.append(f"source {n} holds values that are not finite")
    if faults:
        raise PromptError("; ".join(faults))
    return [np.ascontiguousarray(each, np.float32) for each in several]
