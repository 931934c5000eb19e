"""Units of text: pieces whose tokens do not depend on what stands before or behind them.

A unit is cut out of a document wherever the tokenizer cuts as well, whatever the text is. So each
distinct unit needs to be encoded once, however often it occurs, and the counts are the same. What
makes that true is stated per row of `_FAMILIES`; a tokenizer that fits no row is not cut.

Written ∣, a cut is safe where text(A ∣ B) gives the tokens of A followed by those of B. A regular
expression that is matched from left to right, without looking back, cuts there if no match of it
can hold the last character of A and the first of B, and none that ends in A looks beyond it. A
step before it may pass A ∣ B on as one piece, or cut it; a step behind it sees A and B apart.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from headport.quantize.count.pieces import (
    ANY_CLASS,
    BEFORE_SIGN,
    Needles,
    PieceCutter,
    spaced_words_of,
    spelled_bytes,
    word_of,
)

__all__ = ["UnitPlan", "find_plan"]

_Json = dict[str, Any]

# Python's \s holds every White_Space character, the separators U+001C…1F, which other engines do
# not count, and not U+180E, which old ones do. `_GAP` is what any of them may take for white space;
# a cut needs a character outside it on the left, and one that all of them count on the right.
_GAP, _INK = r"[\s\u180e]", r"[^\s\u180e]"


def _cut_before(spaces: str, joined: str = "") -> re.Pattern[str]:
    """Units that end in ink before one of these ASCII spaces, except where `joined` matches."""
    on = rf"[^\S{spaces}]|\u180e" + (f"|{joined}" if joined else "")
    return re.compile(rf"{_GAP}*{_INK}+(?:(?:{on}){_GAP}*{_INK}*)*|{_GAP}+")


_BEFORE_WHITE_SPACE = _cut_before(r" \t\n\r\f\v")
# A line break only behind an ASCII letter or digit: other characters may take it into their piece.
_BEFORE_BLANK = _cut_before(r" \t\n\r", r"(?<![A-Za-z0-9])[\r\n]")
_BEFORE_SPACE = _cut_before(" ")
_BETWEEN_SPACES = re.compile(r"[^ \t\n\r]+")
_BEFORE_EACH_SPACE = re.compile(r" [^ ]*|[^ ]+")
_MARK = "▁"
_BEFORE_MARKS = re.compile(f"{_MARK}*[^{_MARK}]+|{_MARK}+")

# No match of it holds ink followed by white space, nor looks beyond ink.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Ink is followed by white space in one alternative only: [\r\n] behind what is no letter or number.
_LETTERS_WITH_ONE_BEFORE = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"  # cl100k, Llama 3
)
_SINGLE_DIGITS = _LETTERS_WITH_ONE_BEFORE.replace(r"\p{N}{1,3}", r"\p{N}")  # Qwen 2
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_CASED = (  # o200k: the same with words split where capitals begin
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDING}|"
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDING}|\p{{N}}{{1,3}}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class _Cuts:
    """Where a pre-tokenizer's regular expression cuts."""

    units: re.Pattern[str]
    pieces: re.Pattern[str]  # between ASCII classes
    words: Callable[[str], list[str]] | None  # pieces whose matches are known


_OF_GPT2 = _Cuts(_BEFORE_WHITE_SPACE, ANY_CLASS, spaced_words_of)
_SPLITS = {
    _GPT2: _OF_GPT2,
    _LETTERS_WITH_ONE_BEFORE: _Cuts(_BEFORE_BLANK, BEFORE_SIGN, word_of),
    _SINGLE_DIGITS: _Cuts(_BEFORE_BLANK, BEFORE_SIGN, word_of),
    _CASED: _Cuts(_BEFORE_BLANK, BEFORE_SIGN, None),  # where words are split is not looked into
}


@dataclass(frozen=True)
class UnitPlan:
    """How a document becomes units, and what encodes a unit."""

    reason: str
    pattern: re.Pattern[str]  # its matches are the units
    normalize: bool  # the document is normalised before it is cut
    encoder: str  # tokenizer.json of what encodes units
    whole: Needles  # a document that holds one of these is encoded as a whole
    cutter: PieceCutter | None = None  # cuts units further


def find_plan(tokenizer: Tokenizer) -> UnitPlan | str:
    """The plan for a tokenizer, or in words why its documents must be encoded as a whole."""
    data: _Json = json.loads(tokenizer.to_str())
    if data["model"].get("dropout"):
        return "its merges drop out at random"
    reasons = []
    for family in _FAMILIES:
        found = family(data)
        if isinstance(found, UnitPlan):
            return found
        reasons.append(found)
    return "; ".join(dict.fromkeys(reasons))


def _byte_level(data: _Json) -> UnitPlan | str:
    # Digits cuts between characters, and ByteLevel without a regex only spells them; but it may put
    # a space before a piece that does not begin with one, so a piece behind a cut must.
    steps = _steps(data["pre_tokenizer"])
    found = [cuts for step in steps if (cuts := _cuts_of(step)) is not None]
    if len(found) != 1 or not all(_cuts_of(s) or _is_local(s) for s in steps):
        return "its pre-tokenizer is not one whose cuts are known"
    kind = (data["normalizer"] or {}).get("type")
    if kind not in (None, "NFC", "NFD"):  # neither joins, parts or makes white space
        return f"its normalizer {kind} may change what a cut separates"
    whole = _reaching_tokens(data)
    if isinstance(whole, str):
        return whole
    reason = "its pre-tokenizer cuts before white space"
    encoder = _without(data, "post_processor")
    if any(step.get("add_prefix_space") for step in steps):
        return UnitPlan(reason, _BEFORE_SPACE, False, encoder, whole)
    return UnitPlan(reason, found[0].units, False, encoder, whole, _piece_cutter(data, found[0]))


def _piece_cutter(data: _Json, cuts: _Cuts) -> PieceCutter | None:
    # Normalisation to NFC or NFD joins no two of the characters between which pieces are cut, but
    # it may make an added token out of others.
    if data["normalizer"] is not None and any(t["normalized"] for t in data["added_tokens"]):
        return None
    added = [token["content"] for token in data["added_tokens"]]
    kinds = {step["type"] for step in _steps(data["pre_tokenizer"])}
    if cuts.words is None or data["model"]["type"] != "BPE" or "ByteLevel" not in kinds:
        return PieceCutter(cuts.pieces, added)
    tokens = map(spelled_bytes, data["model"]["vocab"] if _merges_alone(data["model"]) else ())
    return PieceCutter(cuts.pieces, added, tokens, cuts.words)


def _merges_alone(model: _Json) -> bool:
    """Whether merges alone decide how a piece becomes tokens, wherever in a word it stands."""
    others = ("ignore_merges", "fuse_unk", "continuing_subword_prefix", "end_of_word_suffix")
    return not any(model.get(name) for name in others)


def _cuts_of(step: _Json) -> _Cuts | None:
    if step["type"] == "ByteLevel" and step["use_regex"]:
        return _OF_GPT2
    if step["type"] != "Split":
        return None
    # Every character is in some match, so that what lies between matches is nothing.
    kept = (step["behavior"], step["invert"]) in (("Isolated", False), ("Removed", True))
    return _SPLITS.get(step["pattern"].get("Regex", "")) if kept else None


def _is_local(step: _Json) -> bool:
    return step["type"] == "Digits" or (step["type"] == "ByteLevel" and not step["use_regex"])


def _words(data: _Json) -> UnitPlan | str:
    # White space separates words and is no part of any; BertNormalizer changes characters one by
    # one, or together with the marks on them, and turns no space into anything else.
    kinds = [step["type"] for step in _steps(data["pre_tokenizer"])]
    if not kinds or kinds[0] not in ("BertPreTokenizer", "Whitespace", "WhitespaceSplit"):
        return "its pre-tokenizer is not one whose cuts are known"
    if "Metaspace" in kinds:
        return "a mark is put before words"
    kind = (data["normalizer"] or {}).get("type")
    if kind not in (None, "BertNormalizer", "Lowercase", "NFC", "NFD"):
        return f"its normalizer {kind} may change what a cut separates"
    whole = _reaching_tokens(data)
    if isinstance(whole, str):
        return whole
    reason = "its pre-tokenizer drops white space"
    return UnitPlan(reason, _BETWEEN_SPACES, False, _without(data, "post_processor"), whole)


def _marked_words(data: _Json) -> UnitPlan | str:
    # Each space begins a piece. A piece that begins with a space gets no mark of its own, so only
    # a document's first may, as it does alone; `first` looks at where a piece was before
    # normalisation, which a unit that is normalised beforehand cannot show.
    steps = _steps(data["pre_tokenizer"])
    kinds = [step["type"] for step in steps]
    if kinds not in (["Metaspace"], ["WhitespaceSplit", "Metaspace"]) or not steps[-1]["split"]:
        return "its pre-tokenizer is not one whose cuts are known"
    if steps[-1]["prepend_scheme"] == "first" and data["normalizer"] is not None:
        return "which piece is marked as first depends on its normalizer"
    whole = _all_tokens(data)
    if isinstance(whole, str):
        return whole
    reason = "its pre-tokenizer cuts before each space"
    encoder = _without(data, "post_processor", "normalizer", "added_tokens")
    return UnitPlan(reason, _BEFORE_EACH_SPACE, True, encoder, whole)


def _marked_merges(data: _Json) -> UnitPlan | str:
    # Merges make vocabulary entries only. If none holds a mark behind something else, no merge
    # ever joins the two sides of such a place, and the order of merges on one side does not
    # depend on the other. A sequence that is an entry itself would need no merges.
    model = data["model"]
    if model["type"] != "BPE" or model.get("ignore_merges"):
        return "it has no pre-tokenizer"
    steps = _steps(data["pre_tokenizer"])
    if steps and not (_replaces_spaces(data["normalizer"]) and _splits_spaces_only(steps)):
        return "its pre-tokenizer is not one whose cuts are known"
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        return "its pieces depend on where a word begins or ends"
    vocabulary = model["vocab"]
    if _MARK not in vocabulary or any(_MARK in t.lstrip(_MARK) for t in vocabulary):
        return "it has no pre-tokenizer, and some of its tokens reach over a word's beginning"
    whole = _all_tokens(data)
    if isinstance(whole, str):
        return whole
    reason = "none of its merges reaches over the beginning of a word"
    encoder = _without(data, "post_processor", "normalizer", "pre_tokenizer", "added_tokens")
    return UnitPlan(reason, _BEFORE_MARKS, True, encoder, whole)


def _replaces_spaces(normalizer: _Json | None) -> bool:
    if normalizer is None:
        return False
    last = normalizer["normalizers"][-1] if normalizer["type"] == "Sequence" else normalizer
    return bool(last["type"] == "Replace" and last["pattern"] == {"String": " "})


def _splits_spaces_only(steps: list[_Json]) -> bool:
    return all(s["type"] == "Split" and s["pattern"] == {"String": " "} for s in steps)


def _steps(pre_tokenizer: _Json | None) -> list[_Json]:
    if pre_tokenizer is None:
        return []
    if pre_tokenizer["type"] != "Sequence":
        return [pre_tokenizer]
    return [inner for step in pre_tokenizer["pretokenizers"] for inner in _steps(step)]


def _reaching_tokens(data: _Json) -> Needles | str:
    """Added tokens that take in, or look at, more than a unit of text."""
    found = [token for token in data["added_tokens"] if _reaches(token)]
    if data["normalizer"] is not None and any(token["normalized"] for token in found):
        return "an added token is looked for in normalised text and may hold white space"
    return Needles(token["content"] for token in found)


def _reaches(token: _Json) -> bool:
    flags = token["lstrip"] or token["rstrip"] or token["single_word"]
    return bool(flags or re.search(_GAP, token["content"]))


def _all_tokens(data: _Json) -> Needles | str:
    """All added tokens: they are looked for before a document is normalised."""
    if data["normalizer"] is not None and any(t["normalized"] for t in data["added_tokens"]):
        return "an added token is looked for in normalised text"
    return Needles(token["content"] for token in data["added_tokens"])


def _without(data: _Json, *parts: str) -> str:
    empty: _Json = {part: [] if part == "added_tokens" else None for part in parts}
    return json.dumps({**data, **empty, "truncation": None, "padding": None})


_FAMILIES: tuple[Callable[[_Json], UnitPlan | str], ...] = (
    _byte_level,
    _words,
    _marked_words,
    _marked_merges,
)
