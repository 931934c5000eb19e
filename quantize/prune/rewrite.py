"""A tokenizer that knows some of its tokens only, under the numbers 0 … K - 1.

BPE        vocabulary, and the merges whose parts and outcome are kept, in their order
Unigram    pieces with their scores, in their order; number of the unknown piece
WordPiece  vocabulary
all        added tokens, post-processor and padding get the new numbers; normalizer,
           pre-tokenizer and decoder know none and stay
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from headport.errors import QuantizeError
from headport.quantize.prune.merges import Merges
from headport.quantize.prune.tokens import TokenTable

__all__ = ["refuse_tokenizer", "rewrite_tokenizer"]

Int64 = npt.NDArray[np.int64]
Numbers = Mapping[int, int]  # old id → new id, kept ones only


def refuse_tokenizer(table: TokenTable, size: int) -> None:
    """Refuse a tokenizer that cannot be rewritten.

    Args:
        table: The tokenizer.
        size: V, the rows that the model has for tokens.

    Raises:
        QuantizeError: Naming the reason, and what works with it.
    """
    instead = "use --mode output, which leaves the tokenizer as it is"
    if table.kind not in _MODELS:
        known = ", ".join(_MODELS)
        raise QuantizeError(
            f"--mode both: a tokenizer of type {known} was expected, {table.kind} found; {instead}"
        )
    if table.model.get("dropout"):
        raise QuantizeError(
            f"--mode both: the tokenizer leaves out merges at random (dropout "
            f"{table.model['dropout']}), so no text has one spelling; {instead}"
        )
    if beyond := sorted(i for i in table.added if i >= size):
        raise QuantizeError(
            f"--mode both: the tokenizer adds {len(beyond)} tokens that the model has no row for, "
            f"such as {table.pieces[beyond[0]]!r} (id:{beyond[0]}, {size} rows); {instead}"
        )


def rewrite_tokenizer(table: TokenTable, kept: Int64) -> str:
    """The contents of a `tokenizer.json` that knows the kept tokens only.

    Args:
        table: The tokenizer, one that `refuse_tokenizer` lets pass.
        kept: Ids that stay, ascending, [K]; their places are the new ids. What
            `closure.always_kept` gives must be among them.

    """
    numbers = {int(old): new for new, old in enumerate(kept)}
    document = dict(table.document)
    document["model"] = _MODELS[table.kind](table, numbers)
    document["added_tokens"] = [
        token | {"id": numbers[token["id"]]} for token in document["added_tokens"]
    ]
    document["post_processor"] = _processor(document.get("post_processor"), numbers)
    if document.get("padding"):
        padding = document["padding"]
        document["padding"] = padding | {"pad_id": numbers[padding["pad_id"]]}
    return json.dumps(document, ensure_ascii=False, indent=2) + "\n"


def _vocabulary(table: TokenTable, numbers: Numbers) -> dict[str, int]:
    found = ((piece, numbers[old]) for piece, old in table.vocabulary.items() if old in numbers)
    return dict(sorted(found, key=lambda pair: pair[1]))


def _bpe(table: TokenTable, numbers: Numbers) -> dict[str, Any]:
    vocabulary = _vocabulary(table, numbers)
    outcome = Merges(table.model | {"merges": []}, vocabulary).outcome
    merges = [
        [left, right]
        for left, right in table.model["merges"]
        if left in vocabulary and right in vocabulary and outcome(left, right) is not None
    ]
    return table.model | {"vocab": vocabulary, "merges": merges}


def _unigram(table: TokenTable, numbers: Numbers) -> dict[str, Any]:
    pieces = [entry for old, entry in enumerate(table.model["vocab"]) if old in numbers]
    unknown = table.model.get("unk_id")
    new = None if unknown is None else numbers[unknown]
    return table.model | {"vocab": pieces, "unk_id": new}


def _word_piece(table: TokenTable, numbers: Numbers) -> dict[str, Any]:
    return table.model | {"vocab": _vocabulary(table, numbers)}


_MODELS: dict[str, Callable[[TokenTable, Numbers], dict[str, Any]]] = {
    "BPE": _bpe,
    "Unigram": _unigram,
    "WordPiece": _word_piece,
}


def _processor(part: Any, numbers: Numbers) -> Any:
    if not isinstance(part, dict):
        return part
    made = dict(part)
    for name in ("sep", "cls"):
        if isinstance(part.get(name), list):
            token, old = part[name]
            made[name] = [token, numbers[old]]
    if part.get("type") == "TemplateProcessing":
        made["special_tokens"] = {
            name: token | {"ids": [numbers[old] for old in token["ids"]]}
            for name, token in part["special_tokens"].items()
        }
    if isinstance(part.get("processors"), list):
        made["processors"] = [_processor(each, numbers) for each in part["processors"]]
    return made
