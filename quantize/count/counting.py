"""Counts the tokens of documents, encoding each distinct unit of text once."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from headport.errors import UsageError
from headport.quantize.count.units import UnitPlan, find_plan

__all__ = ["Counted", "TokenCounter", "open_tokenizer", "read_tokenizer"]

Int64 = npt.NDArray[np.int64]

# Units whose tokens are remembered between batches: some 100 MB. When they are too many, all are
# forgotten; the frequent ones come back with the next batch.
_REMEMBERED = 500_000
_ENCODED_AT_ONCE = 1 << 14


@dataclass(frozen=True)
class Counted:
    """Tokens of some documents."""

    counts: Int64  # [vocab_size]
    documents: int
    bytes: int  # UTF-8


def open_tokenizer(source: str) -> tuple[Tokenizer, int]:
    """A tokenizer from the text of its tokenizer.json, and its vocabulary size.

    Raises:
        UsageError: If it cannot be read or knows no token.
    """
    try:
        tokenizer = Tokenizer.from_str(source)
    except Exception as error:  # tokenizers raises plain Exception for what it cannot parse
        raise UsageError(
            f"tokenizer.json: no usable tokenizer ({error}); take the one of the checkpoint"
        ) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    ids = tokenizer.get_vocab(with_added_tokens=True).values()
    if not ids:
        raise UsageError("tokenizer.json: a vocabulary was expected, it is empty")
    return tokenizer, max(ids) + 1


class TokenCounter:
    """Counts documents as `encode(text, add_special_tokens=False)` splits them.

    Args:
        source: Text of the checkpoint's tokenizer.json.
        units: False encodes every document as a whole, whatever the tokenizer is.
    """

    def __init__(self, source: str, *, units: bool = True) -> None:
        self._tokenizer, self.vocab_size = open_tokenizer(source)
        plan = find_plan(self._tokenizer) if units else "it was asked for"
        self._encoder = self._tokenizer
        if isinstance(plan, UnitPlan):
            try:
                self._encoder, _ = open_tokenizer(plan.encoder)
            except UsageError as error:  # ids with holes are written, and cannot be read back
                plan = f"no copy of it can be made ({error})"
        self._plan = plan if isinstance(plan, UnitPlan) else None
        self.reason = plan.reason if isinstance(plan, UnitPlan) else plan
        normalizer = self._tokenizer.normalizer
        self._normalize = (
            normalizer.normalize_str
            if self._plan and self._plan.normalize and normalizer is not None
            else None
        )
        self._tokenize = self._encoder.model.tokenize
        self._ids: dict[str, bytes] = {}  # unit → its token ids, int32

    @property
    def counts_units(self) -> bool:
        """Whether units are counted, and not whole documents."""
        return self._plan is not None

    def count(self, documents: Sequence[str]) -> Counted:
        """Tokens of documents; special tokens that a post-processor adds are not counted.

        Args:
            documents: Texts without lone surrogates.
        """
        counts = np.zeros(self.vocab_size, np.int64)
        whole: Sequence[str] = documents
        if self._plan is not None:
            units: Counter[str] = Counter()
            find, normalize = self._plan.pattern.findall, self._normalize
            whole = []
            for text in documents:
                if self._plan.whole.is_in(text):
                    whole.append(text)
                else:
                    units.update(find(text if normalize is None else normalize(text)))
            self._add_units(units, counts)
        for start in range(0, len(whole), _ENCODED_AT_ONCE):
            self._add_whole(whole[start : start + _ENCODED_AT_ONCE], counts)
        size = sum(len(text.encode()) for text in documents)
        return Counted(counts, len(documents), size)

    def _add_whole(self, documents: Sequence[str], counts: Int64) -> None:
        for encoding in self._tokenizer.encode_batch_fast(documents, add_special_tokens=False):
            counts += np.bincount(np.array(encoding.ids, np.int64), minlength=len(counts))

    def _add_units(self, units: Counter[str], counts: Int64) -> None:
        known = self._ids
        new = [unit for unit in units if unit not in known]
        if len(known) + len(new) > _REMEMBERED:
            known.clear()
            new = list(units)
        self._learn(new)
        pieces = [known[unit] for unit in units]
        ids = np.frombuffer(b"".join(pieces), np.int32)
        lengths = np.array([len(piece) // 4 for piece in pieces], np.int64)
        times = np.repeat(np.fromiter(units.values(), np.int64, len(units)), lengths)
        # Weights of bincount are float64: exact up to 2⁵³ occurrences in one batch.
        counts += np.bincount(ids, times, len(counts)).astype(np.int64)

    def _learn(self, units: list[str]) -> None:
        """Encode units that are not known yet, each distinct piece of them once."""
        known, cutter = self._ids, self._plan.cutter if self._plan else None
        if cutter is None:
            self._encode(units)
            return
        cut = [cutter.cut(unit) for unit in units]
        rest = []
        for piece in dict.fromkeys(piece for pieces in cut for piece in pieces):
            if piece in known:
                continue
            words = cutter.words(piece)
            if words:  # straight to the model: a fifth of the time
                known[piece] = _packed([t.id for word in words for t in self._tokenize(word)])
            else:
                rest.append(piece)
        self._encode(rest)
        for unit, pieces in zip(units, cut, strict=True):
            known[unit] = b"".join([known[piece] for piece in pieces])

    def _encode(self, texts: list[str]) -> None:
        for start in range(0, len(texts), _ENCODED_AT_ONCE):
            part = texts[start : start + _ENCODED_AT_ONCE]
            found = self._encoder.encode_batch_fast(part, add_special_tokens=False)
            for text, encoding in zip(part, found, strict=True):
                self._ids[text] = _packed(encoding.ids)


def _packed(ids: list[int]) -> bytes:
    return array("i", ids).tobytes()


def read_tokenizer(folder: Path) -> str:
    """The text of a checkpoint's or bundle's tokenizer.json.

    Raises:
        UsageError: If there is none, or it is not UTF-8.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        advice = "export the checkpoint and pass the bundle"
        kind = "a .gguf file" if folder.suffix == ".gguf" else f"{folder} without one"
        raise UsageError(f"a folder with tokenizer.json was expected, {kind} found; {advice}")
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: UTF-8 was expected ({error})") from error
