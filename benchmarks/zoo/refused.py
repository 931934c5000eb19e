"""Configurations that must be refused, and what the message must say."""

from __future__ import annotations

from benchmarks.zoo.family import GPT, LLAMA, Refusal
from tests.conftest import VOCAB_SIZE

__all__ = ["REFUSED"]

REFUSED: tuple[Refusal, ...] = (
    Refusal(
        "xlnet",
        "XLNetConfig",
        {"vocab_size": VOCAB_SIZE, "d_model": 32, "n_layer": 1, "n_head": 2, "d_inner": 48},
        "XLNetLMHeadModel is refused",
    ),
    Refusal(
        "xlm",
        "XLMConfig",
        {"vocab_size": VOCAB_SIZE, "emb_dim": 32, "n_layers": 1, "n_heads": 2},
        "XLMWithLMHeadModel is refused",
    ),
    Refusal(
        "xlm-asm",
        "XLMConfig",
        {
            "vocab_size": VOCAB_SIZE,
            "emb_dim": 32,
            "n_layers": 1,
            "n_heads": 2,
            "asm": True,
            "asm_cutoffs": [20, 60],
            "asm_div_value": 2.0,
        },
        "AdaptiveLogSoftmaxWithLoss",
    ),
    Refusal("dory", "DoryConfig", LLAMA | {"n_input_layers": 1, "n_output_layers": 0}, "Dory"),
    Refusal("llama4", "Llama4TextConfig", LLAMA, "Llama4ForCausalLM"),
    Refusal("jetmoe", "JetMoeConfig", LLAMA | {"num_local_experts": 4}, "JetMoeForCausalLM"),
    Refusal("diffllama", "DiffLlamaConfig", LLAMA, "DiffLlamaForCausalLM is refused"),
    Refusal("doge", "DogeConfig", LLAMA, "DogeForCausalLM is refused"),
    Refusal(
        "musicgen",
        "MusicgenDecoderConfig",
        LLAMA | {"num_codebooks": 2, "ffn_dim": 48},
        "Musicgen",
        "MusicgenForCausalLM",
    ),
    Refusal(
        "fsmt",
        "FSMTConfig",
        {
            "src_vocab_size": VOCAB_SIZE,
            "tgt_vocab_size": VOCAB_SIZE,
            "langs": ["en", "de"],
            "d_model": 32,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
        },
        "causal language model was expected",
        "FSMTForConditionalGeneration",
    ),
    Refusal(
        "esm",
        "EsmConfig",
        {"vocab_size": 33, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        | {"pad_token_id": 1, "mask_token_id": 2},
        "causal language model was expected",
        "EsmForMaskedLM",
    ),
    Refusal("gpt2-double-heads", "GPT2Config", GPT, "GPT2DoubleHeads", "GPT2DoubleHeadsModel"),
)
