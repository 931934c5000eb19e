"""The tokens that a decoder starts with, as the bundle's generation_config states them.

    start token, then what the call gives as `prefix`, else `forced_decoder_ids`, then (Whisper, as
    long as no timestamps are asked for) the token that says so

Whisper's fields are read as transformers 5.24 reads them (`_retrieve_init_tokens`), but for the
detection of a language, which takes a run of its own: there the call must name it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headport.errors import BundleError, PromptError
from headport.runtime.limits import is_whole

__all__ = ["START_FIELDS", "DecoderStart", "read_start"]

# Fields that say how a decoder starts, or that only matter where one of those does.
START_FIELDS = frozenset(
    {
        "alignment_heads",
        "decoder_start_token_id",
        "forced_decoder_ids",
        "is_multilingual",
        "lang_to_id",
        "language",
        "max_initial_timestamp_index",
        "no_timestamps_token_id",
        "prev_sot_token_id",
        "return_timestamps",
        "task",
        "task_to_id",
    }
)


@dataclass(frozen=True)
class DecoderStart:
    """How every reply of a bundle starts."""

    token_id: int
    forced: tuple[int, ...] = ()  # where a call gives no prefix
    last: int | None = None  # comes last, unless it does already
    open: str = ""  # why a call must give a prefix; "": it need not

    def prompt(self, prefix: Sequence[int] | None) -> list[int]:
        """The tokens that a reply continues.

        Args:
            prefix: Begin of the reply that the call gives; None: none.

        Raises:
            PromptError: If the call must give one.
        """
        if prefix is None and self.open:
            raise PromptError(
                f"{self.open}; give its tokens as prefix, such as <|en|><|transcribe|>"
            )
        given = list(self.forced if prefix is None else prefix)
        if given[:1] == [self.token_id]:  # as transformers takes decoder_input_ids
            given = given[1:]
        found = [self.token_id, *given]
        return found if self.last in (None, found[-1]) else [*found, int(self.last or 0)]


def read_start(fields: Mapping[str, Any], ignore: Collection[str] = ()) -> DecoderStart:
    """Read how a bundle's decoder starts.

    Args:
        fields: Its generation defaults.
        ignore: Fields to leave out.

    Raises:
        BundleError: If no start token is stated, or something cannot be read as one.
    """
    given = {k: v for k, v in fields.items() if v is not None and k not in ignore}
    start = given.get("decoder_start_token_id", given.get("bos_token_id"))
    if start is None or not is_whole(start):
        found = "neither it nor bos_token_id is there" if start is None else f"{start!r} is there"
        raise BundleError(
            "the bundle's generation_config must state decoder_start_token_id, one token id; "
            f"{found}; correct generation_config.json beside the checkpoint and export it again"
        )
    if given.get("return_timestamps"):
        raise BundleError(
            "the bundle's generation_config asks for return_timestamps=True, which this runtime "
            "does not support; to run without, ignore it by name: ignore=('return_timestamps',)"
        )
    forced, hole = _forced(given.get("forced_decoder_ids") or ())
    reason = next((text for text, wanted in _OPEN if wanted(given, forced, hole)), "")
    return DecoderStart(int(start), forced, given.get("no_timestamps_token_id"), reason)


def _forced(pairs: Sequence[Any]) -> tuple[tuple[int, ...], bool]:
    """Ids at positions 1, 2 …; and whether one of them is left open."""
    try:
        found = {int(place): token_id for place, token_id in pairs}
    except (TypeError, ValueError):
        found = {0: None}
    if sorted(found) != list(range(1, len(found) + 1)):
        raise BundleError(
            f"the bundle's forced_decoder_ids is {list(pairs)!r}; [position, token id] for each "
            "position from 1 up was expected"
        )
    ids = [found[place] for place in sorted(found)]
    return tuple(int(i) for i in ids if i is not None), None in ids


_Wanted = Callable[[Mapping[str, Any], tuple[int, ...], bool], bool]
_OPEN: tuple[tuple[str, _Wanted], ...] = (
    (
        "the bundle's generation_config names a language or a task in words",
        lambda given, _forced, _hole: "language" in given or "task" in given,
    ),
    (
        "the bundle's forced_decoder_ids leaves the language open",
        lambda _given, _forced, hole: hole,
    ),
    (
        "the bundle knows several languages and its generation_config names none",
        lambda given, forced, _hole: bool(given.get("lang_to_id")) and not forced,
    ),
)
