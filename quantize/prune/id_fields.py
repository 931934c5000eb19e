"""Where configuration files name token ids: to collect them, and to give them new ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["Rename", "ids_of", "rename_fields"]

# Old id → new id, or None where there is none.
Rename = Callable[[int], int | None]

_SUFFIXES = ("_token_id", "_token_index", "_token_ids")  # an id, or several
_IDS = ("suppress_tokens", "begin_suppress_tokens")  # several, each by itself
_SEQUENCES = ("bad_words_ids", "force_words_ids")  # lists of ids that belong together
_NAMED = ("lang_to_id", "task_to_id")  # name → id
_PLACED = ("forced_decoder_ids",)  # [place, id]
_WEIGHED = ("sequence_bias",)  # [ids that belong together, number]


def rename_fields(fields: Mapping[str, Any], rename: Rename) -> tuple[dict[str, Any], list[str]]:
    """Give the token ids in a configuration, also in nested ones, new ids.

    What names an id that has no new one is left out: the id from a list, the whole sequence from
    a list of sequences; a field of one id becomes null.

    Args:
        fields: A configuration as JSON.
        rename: Old id → new id, or None.

    Returns:
        The new configuration, and what was left out, as `field: value`.
    """
    made: dict[str, Any] = {}
    lost: list[str] = []
    for name, value in fields.items():
        if isinstance(value, Mapping) and name not in _NAMED + _WEIGHED:
            made[name], inner = rename_fields(value, rename)
            lost += [f"{name}.{each}" for each in inner]
            continue
        made[name], gone = _renamed(name, value, rename)
        lost += [f"{name}: {each}" for each in gone]
    return made, lost


def ids_of(fields: Mapping[str, Any]) -> set[int]:
    """All token ids that a configuration names, also such that do not exist."""
    found: set[int] = set()

    def note(token_id: int) -> int:
        found.add(token_id)
        return token_id

    rename_fields(fields, note)
    return found


def _renamed(name: str, value: Any, rename: Rename) -> tuple[Any, list[Any]]:
    if name.endswith(_SUFFIXES) or name in _IDS:
        return _several(value, rename)
    if name in _SEQUENCES and isinstance(value, list):
        return _sequences(value, rename)
    if name in _NAMED and isinstance(value, Mapping):
        new = {key: rename(each) for key, each in value.items()}
        return {k: v for k, v in new.items() if v is not None}, [
            value[k] for k, v in new.items() if v is None
        ]
    if name in _PLACED and isinstance(value, list):
        pairs = [(pair, None if pair[1] is None else rename(pair[1])) for pair in value]
        return [[p[0], new] for p, new in pairs if new is not None or p[1] is None], [
            p for p, new in pairs if new is None and p[1] is not None
        ]
    if name in _WEIGHED and isinstance(value, list):
        found = [(pair, _sequence(pair[0], rename)) for pair in value]
        return [[new, pair[1]] for pair, new in found if new is not None], [
            pair[0] for pair, new in found if new is None
        ]
    return value, []


def _several(value: Any, rename: Rename) -> tuple[Any, list[Any]]:
    if isinstance(value, bool) or not isinstance(value, int | list):
        return value, []
    if isinstance(value, int):
        new = rename(value)
        return new, [value] if new is None else []
    pairs = [(each, rename(each)) for each in value]
    return [new for _, new in pairs if new is not None], [old for old, new in pairs if new is None]


def _sequences(value: list[Any], rename: Rename) -> tuple[list[Any], list[Any]]:
    if value and all(isinstance(each, list) for part in value for each in part):
        parts = [_sequences(part, rename) for part in value]  # choices between sequences
        return [p for p, _ in parts], [each for _, lost in parts for each in lost]
    found = [(each, _sequence(each, rename)) for each in value]
    return [new for _, new in found if new is not None], [old for old, new in found if new is None]


def _sequence(ids: list[int], rename: Rename) -> list[int] | None:
    new = [rename(each) for each in ids]
    return [each for each in new if each is not None] if None not in new else None
