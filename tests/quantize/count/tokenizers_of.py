"""Small tokenizers of every family, trained on a few lines."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from headport.quantize.count import units

LINES = (
    "The head is the last matrix of a language model; it's wide, isn't it?",
    "def add(a: int, b: int) -> int:\n    return a + b  # 12 + 345\n\n",
    "中文中文的文中，的中文",
    "naïve café, 中文 and emoji 🙂 and  two   spaces\tand a tab",
    "1234567 PATIENTS' notes: 3.5 mg/kg\r\n\r\n\tsee /etc/hosts!\n/x",
)


def byte_level(prefix: bool = False, *steps: Any) -> Tokenizer:
    """Byte-level BPE with GPT-2's pre-tokenizer, behind other steps."""
    last = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    return _trained_bytes(pre_tokenizers.Sequence([*steps, last]) if steps else last)


def split_by(pattern: str, normalizer: Any = None) -> Tokenizer:
    """Byte-level BPE behind a regular expression."""
    from tokenizers import Regex

    steps = [
        pre_tokenizers.Split(Regex(pattern), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
    return _trained_bytes(pre_tokenizers.Sequence(steps), normalizer)


def _trained_bytes(pre_tokenizer: Any, normalizer: Any = None) -> Tokenizer:
    found = Tokenizer(models.BPE())
    found.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        found.normalizer = normalizer
    found.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|end|>", "<|start|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    found.train_from_iterator(LINES * 3, trainer)
    found.post_processor = processors.TemplateProcessing("$A <|end|>", None, [("<|end|>", 0)])
    return found


def word_pieces() -> Tokenizer:
    """BERT's normalizer and pre-tokenizer with WordPiece."""
    found = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    found.normalizer = normalizers.BertNormalizer(lowercase=True)
    found.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=200, special_tokens=["[UNK]", "[MASK]"], show_progress=False
    )
    found.train_from_iterator(LINES, trainer)
    return found


def unigram(prepend: str = "always", normalizer: Any = None) -> Tokenizer:
    """SentencePiece's Unigram as T5 has it."""
    found = Tokenizer(models.Unigram())
    if normalizer is not None:
        found.normalizer = normalizer
    found.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend)
    trainer = trainers.UnigramTrainer(
        vocab_size=120, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
    )
    found.train_from_iterator(LINES, trainer)
    return found


def marked_merges() -> Tokenizer:
    """BPE as Llama 2 has it: marks by the normalizer, no pre-tokenizer, byte fallback."""
    found = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    found.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    bytes_ = [f"<0x{b:02X}>" for b in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=["<unk>", "<s>", *bytes_], show_progress=False
    )
    found.train_from_iterator(LINES, trainer)
    data = json.loads(found.to_str())
    data["pre_tokenizer"] = None
    # Bytes are tokens of the model only; spelt out in a text they mean nothing.
    data["added_tokens"] = [t for t in data["added_tokens"] if t["content"] in ("<unk>", "<s>")]
    marks = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    marked = Tokenizer.from_str(json.dumps(data))
    marked.normalizer = normalizers.Sequence(marks)
    return marked


def with_tokens(make: Callable[[], Tokenizer], *tokens: AddedToken) -> Tokenizer:
    """A tokenizer with further added tokens."""
    found = make()
    found.add_special_tokens(list(tokens))
    return found


FAMILIES: dict[str, Callable[[], Tokenizer]] = {
    "gpt2": byte_level,
    "gpt2, prefix space": lambda: byte_level(True),
    "gpt2 behind digits": lambda: byte_level(False, pre_tokenizers.Digits(True)),
    "gpt2 as a split": lambda: split_by(units._GPT2),
    "llama 3": lambda: split_by(units._LETTERS_WITH_ONE_BEFORE),
    "qwen 2": lambda: split_by(units._SINGLE_DIGITS, normalizers.NFC()),
    "o200k": lambda: split_by(units._CASED),
    "bert": word_pieces,
    "t5": unigram,
    "unigram, first": lambda: unigram("first"),
    "unigram, normalised": lambda: unigram("always", normalizers.NFKC()),
    "llama 2": marked_merges,
    "tokens that reach": lambda: with_tokens(
        byte_level, AddedToken("<mask>", rstrip=True), AddedToken("  ", normalized=False)
    ),
}
