"""Tiny random encoder-decoder checkpoints of each kind, and what transformers makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import transformers

from headport.export.encoder_decoder.families import FAMILIES
from tests.conftest import VOCAB_SIZE, save_tokenizer

END, PAD, START = 0, 1, 2
LONGEST = 40  # tokens of a reply, and of a source where a table ends
FRAMES, BINS = 24, 6

_IDS: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "pad_token_id": PAD,
    "eos_token_id": END,
    "bos_token_id": None,
    "decoder_start_token_id": START,
}
_LAYERS: dict[str, Any] = _IDS | {
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
}
_TABLE: dict[str, Any] = _LAYERS | {"max_position_embeddings": LONGEST, "scale_embedding": True}
_T5: dict[str, Any] = _IDS | {
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,  # as many as the decoder has: transformers makes its caches by this number
    "num_decoder_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 12,
}
# name → configuration class, settings
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "t5": ("T5Config", _T5),
    "bart": ("BartConfig", _TABLE | {"forced_eos_token_id": END}),
    "marian": ("MarianConfig", _TABLE | {"decoder_vocab_size": VOCAB_SIZE}),
    "whisper": (
        "WhisperConfig",
        _LAYERS
        | {
            "num_mel_bins": BINS,
            "max_source_positions": FRAMES // 2,
            "max_target_positions": LONGEST,
            "suppress_tokens": [7, 9],
            "begin_suppress_tokens": [11, END],
        },
    ),
    "mt5": ("MT5Config", _T5 | {"feed_forward_proj": "gated-gelu"}),
    "umt5": ("UMT5Config", _T5 | {"feed_forward_proj": "gated-gelu"}),
    "mbart": ("MBartConfig", _TABLE),
    "plbart": ("PLBartConfig", _TABLE),
    "pegasus": ("PegasusConfig", _TABLE),
    "blenderbot": ("BlenderbotConfig", _TABLE),
    "blenderbot-small": ("BlenderbotSmallConfig", _TABLE),
}
MAIN = ("t5", "bart", "marian", "whisper")


def save_sourced(folder: Path, name: str, seed: int = 0, **changes: Any) -> Path:
    """Save a random model with weights large enough that every part of it shows in the logits."""
    import torch

    kind, settings = MODELS[name]
    config = getattr(transformers, kind)(**(settings | changes))
    stem = kind.removesuffix("Config")
    [model_class] = [
        c for c in FAMILIES if c in (f"{stem}ForConditionalGeneration", f"{stem}MTModel")
    ]
    torch.manual_seed(seed)
    model = getattr(transformers, model_class)(config).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.25)
            elif key.endswith("bias"):
                parameter.normal_(0.0, 0.5)
        if hasattr(model, "final_logits_bias"):
            model.final_logits_bias.normal_(0.0, 1.0)
    if name == "whisper":
        for field in ("suppress_tokens", "begin_suppress_tokens"):
            setattr(model.generation_config, field, settings[field])
    model.save_pretrained(folder)
    (folder / "LICENSE").write_text("Licence of the tiny test weights: do as you like.\n")
    save_tokenizer(folder)
    return folder


def load(folder: Path) -> Any:
    """The untouched model, float32."""
    import torch

    config = transformers.AutoConfig.from_pretrained(folder)
    model = getattr(transformers, config.architectures[0])
    return model.from_pretrained(folder, dtype=torch.float32).eval()


def sources(name: str, count: int, seed: int = 5) -> list[Any]:
    """Random sources, each of a length of its own where it is ids: id lists, or features."""
    rng = np.random.default_rng(seed)
    if name == "whisper":
        # Noise alone averages out: what tells these apart is a level of each bin.
        levels = rng.normal(0, 3, (count, BINS, 1))
        return list((levels + rng.standard_normal((count, BINS, FRAMES))).astype(np.float32))
    lengths = rng.integers(1, LONGEST + 1, count)
    return [rng.integers(3, VOCAB_SIZE, n).tolist() for n in lengths]


def reply_of_transformers(model: Any, source: Any, **options: Any) -> list[list[int]]:
    """New tokens of each reply that `GenerationMixin.generate` gives to one source."""
    import torch
    from transformers import GenerationMixin

    name = "input_ids" if isinstance(source, list) else "input_features"
    inputs = {name: torch.tensor(np.asarray(source))[None]}
    start = len(options.get("decoder_input_ids", [[START]])[0])
    found = GenerationMixin.generate(model, **inputs, pad_token_id=PAD, **options)
    return [until_end(row[start:]) for row in found.tolist()]


def until_end(tokens: list[int]) -> list[int]:
    """Tokens up to the first end token, which is included; padding behind it goes."""
    end = next((n for n, token in enumerate(tokens) if token == END), len(tokens) - 1)
    return tokens[: end + 1]
