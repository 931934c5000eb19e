"""Small tokenizers of every kind that can be rewritten, trained on a few lines of many scripts."""

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

LINES = (
    "The heart pumps blood through the arteries; a patient with heart failure needs treatment.",
    "Treatment of the patient's arteries was treated as an artery treatment, the doctor said.",
    "def count(tokens: list[int]) -> int:\n    return sum(1 for token in tokens if token > 0)\n",
    "class Counter:\n    def __init__(self, count: int) -> None:\n        self.count = count\n",
    "心臟是人體的器官，血液經過心臟流向全身的器官。病人的心臟需要治療。",
    "naïve café, déjà vu, Übergröße; привет, мир; שלום עולם; مرحبا بالعالم; नमस्ते दुनिया",
    "🙂🙂 emoji 🙂🏽 and numbers 12345 12345 67890 67890",
)
CHAT = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|stop|>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>treatment\\n' }}{% endif %}"
)


def byte_level(size: int = 420, *, ignore_merges: bool = False) -> Tokenizer:
    """As GPT-2 and SmolLM2 have it; ends a text with a token above the model's own range."""
    inner = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<|pad|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(LINES * 3, trainer)
    inner.add_special_tokens(["<|start|>", "<|stop|>"])
    inner.add_tokens([AddedToken("<note>", special=False, normalized=False)])
    stop = inner.token_to_id("<|stop|>")
    inner.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single="$A <|stop|>", pair="$A $B <|stop|>", special_tokens=[("<|stop|>", stop)]
            ),
        ]
    )
    inner.enable_padding(pad_id=inner.token_to_id("<|pad|>"), pad_token="<|pad|>")
    return inner


def sentencepiece_bpe(size: int = 400) -> Tokenizer:
    """As Llama 2 has it: byte pieces for what has none, and every split of a piece as a merge."""
    inner = Tokenizer(models.BPE(unk_token="<unk>"))
    inner.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False
    )
    inner.train_from_iterator(LINES * 3, trainer)
    document = json.loads(inner.to_str())
    trained = list(document["model"]["vocab"])
    pieces = trained[:3] + [f"<0x{byte:02X}>" for byte in range(256)] + trained[3:]
    vocabulary = {piece: n for n, piece in enumerate(pieces)}
    merges = [
        (piece[:cut], piece[cut:])
        for piece in trained[3:]
        for cut in range(1, len(piece))
        if piece[:cut] in vocabulary and piece[cut:] in vocabulary
    ]
    found = Tokenizer(
        models.BPE(
            vocab=vocabulary, merges=merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True
        )
    )
    found.normalizer = inner.normalizer
    found.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    found.add_special_tokens(["<unk>", "<s>", "</s>"])
    found.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", vocabulary["<s>"])]
    )
    return found


def unigram(size: int = 400, *, byte_fallback: bool = False) -> Tokenizer:
    """As T5 and ALBERT have it; with `byte_fallback` as newer ones do."""
    inner = Tokenizer(models.Unigram())
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=size,
        special_tokens=["<pad>", "</s>", "<unk>"],
        unk_token="<unk>",
        show_progress=False,
    )
    inner.train_from_iterator(LINES * 3, trainer)
    if byte_fallback:
        document = json.loads(inner.to_str())
        document["model"]["byte_fallback"] = True
        document["model"]["vocab"] += [[f"<0x{byte:02X}>", -20.0] for byte in range(256)]
        inner = Tokenizer.from_str(json.dumps(document))
        inner.decoder = decoders.Sequence(
            [decoders.ByteFallback(), decoders.Metaspace(), decoders.Fuse()]
        )
    inner.post_processor = processors.TemplateProcessing(
        single="$A </s>",
        pair="$A </s> $B </s>",
        special_tokens=[("</s>", inner.token_to_id("</s>"))],
    )
    return inner


def word_piece(size: int = 400) -> Tokenizer:
    """As BERT has it."""
    inner = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    inner.normalizer = normalizers.BertNormalizer(lowercase=True)
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.decoder = decoders.WordPiece()
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(
        vocab_size=size, special_tokens=specials, show_progress=False
    )
    inner.train_from_iterator(LINES * 3, trainer)
    inner.post_processor = processors.BertProcessing(
        ("[SEP]", inner.token_to_id("[SEP]")), ("[CLS]", inner.token_to_id("[CLS]"))
    )
    return inner


KINDS: dict[str, Callable[..., Any]] = {
    "byte-level BPE": byte_level,
    "byte-level BPE, whole words first": lambda: byte_level(ignore_merges=True),
    "SentencePiece BPE": sentencepiece_bpe,
    "Unigram": unigram,
    "Unigram with bytes": lambda: unigram(byte_fallback=True),
    "WordPiece": word_piece,
}
