"""How a bundle reads sources and starts its decoder: by the runtime's own rules."""

from __future__ import annotations

from collections.abc import Sequence

from headport.bundle import Bundle
from headport.runner import Cache, Runner
from headport.runtime.decoder_start import read_start
from headport.runtime.inputs import open_inputs
from headport.runtime.results import Stats
from headport.runtime.text import Tokens
from headport.validate.given_source import GivenSource

__all__ = ["SourceReader", "open_sources"]

# It chooses what a reply looks like; here all tokens are given.
_IGNORED = ("return_timestamps",)


class SourceReader:
    """Of one encoder-decoder bundle.

    Args:
        bundle: The bundle.
        runner: Runs it.
        tokens: Its tokenizer.

    Raises:
        BundleError: If it states no token that its decoder starts with.
    """

    def __init__(self, bundle: Bundle, runner: Runner, tokens: Tokens) -> None:
        source = bundle.manifest.source
        self.takes_features = source is not None and source.vocab_size is None
        self.start_token = read_start(bundle.manifest.defaults, _IGNORED).token_id
        self._inputs = open_inputs(bundle, runner, tokens, Stats(), _IGNORED)

    def check(self, source: GivenSource) -> None:
        """Refuse a source that the runtime would refuse.

        Raises:
            PromptError: If it is too long, or holds unknown ids or features of another shape.
            OSError: If its file cannot be read.
            ValueError: If its file holds no plain array.
        """
        self._inputs.source(source.values())

    def fill(self, cache: Cache, sources: Sequence[GivenSource]) -> None:
        """Let row b of a cache read source b; each is encoded alone, as for a reply."""
        read = {source: self._inputs.source(source.values()) for source in dict.fromkeys(sources)}
        for row, source in enumerate(sources):
            found = read[source]
            assert found is not None
            found.give(cache, row)


def open_sources(bundle: Bundle, runner: Runner, tokens: Tokens) -> SourceReader | None:
    """The reader of a bundle; None where it reads no source."""
    return None if bundle.manifest.source is None else SourceReader(bundle, runner, tokens)
