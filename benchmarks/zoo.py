"""Tiny configurations of causal-LM families, made so that every feature shows in the logits.

Vocabulary 257, hidden size 64, two layers, context 64, windows of 8: rows longer than a window and
as long as the context cost nothing. Weights are random and large (std 0.2), norms vary around one,
so that logits reach several units and nothing is lost in rounding.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from benchmarks.zoo_recurrent import RECURRENT
from tests.conftest import VOCAB_SIZE, save_tokenizer

__all__ = ["REFUSED", "ZOO", "Family", "Refusal", "save_checkpoint"]

_Settings = dict[str, Any]

_ENDS: _Settings = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0}
_LLAMA: _Settings = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    **_ENDS,
}
_MHA = _LLAMA | {"num_key_value_heads": 4}
_GPT: _Settings = {
    "vocab_size": VOCAB_SIZE,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    **_ENDS,
}
_MIXED: _Settings = {
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"],
}
_MOE = _LLAMA | {
    "moe_intermediate_size": 48,
    "num_experts": 6,
    "num_local_experts": 6,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
}
_MLA: _Settings = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "head_dim": 8,
}
_FALCON: _Settings = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    **_ENDS,
}


@dataclass(frozen=True)
class Family:
    """One configuration, and what its row of the table must say besides."""

    name: str
    config: str  # class in transformers
    settings: _Settings = field(repr=False)
    shows: str = ""  # the feature it is here for
    reference: Literal["eager", "sdpa"] = "eager"
    routed: bool = False  # has experts of which only some are chosen


@dataclass(frozen=True)
class Refusal:
    """A configuration that must be refused, with what its message must say."""

    name: str
    config: str
    settings: _Settings = field(repr=False)
    says: str = ""
    model: str = ""  # class to build, where it is not the config's causal LM


def _f(name: str, config: str, base: _Settings, shows: str = "", **changes: Any) -> Family:
    return Family(name, f"{config}Config", base | changes, shows)


def _moe(name: str, config: str, shows: str = "", **changes: Any) -> Family:
    return Family(name, f"{config}Config", _MOE | changes, shows, routed=True)


_DENSE = (
    _f("llama", "Llama", _LLAMA, "untied, grouped queries", tie_word_embeddings=False),
    _f("llama-tied", "Llama", _LLAMA, "tied", tie_word_embeddings=True),
    _f("llama-mqa", "Llama", _LLAMA, "one key head", num_key_value_heads=1),
    _f("llama-d12", "Llama", _LLAMA, "head size 12", hidden_size=48, head_dim=12),
    _f("mistral", "Mistral", _LLAMA, "sliding window", sliding_window=8),
    _f("ministral", "Ministral", _LLAMA, "mixed windows", **_MIXED),
    _f("qwen2", "Qwen2", _LLAMA, "biases, tied", tie_word_embeddings=True),
    _f("qwen2-mixed", "Qwen2", _LLAMA, "mixed windows", use_sliding_window=True, **_MIXED),
    _f("qwen3", "Qwen3", _LLAMA, "query and key norms"),
    _f("gemma", "Gemma", _LLAMA, "scaled embedding, tied"),
    _f(
        "gemma2",
        "Gemma2",
        _LLAMA,
        "two softcaps, mixed windows",
        attn_logit_softcapping=5.0,
        final_logit_softcapping=4.0,
        query_pre_attn_scalar=16,
        **_MIXED,
    ),
    _f("gemma3", "Gemma3Text", _LLAMA, "mixed windows, two rotary bases", **_MIXED),
    _f("vaultgemma", "VaultGemma", _LLAMA, "softcaps", query_pre_attn_scalar=16, **_MIXED),
    _f("phi", "Phi", _MHA, "head bias, parallel, partial rotary"),
    _f("phi3", "Phi3", _LLAMA, "fused QKV and gate/up, window", sliding_window=8),
    _f("gpt2", "GPT2", _GPT, "learned positions, fused QKV, tied"),
    _f("gptj", "GPTJ", _GPT, "head bias, interleaved rotary, parallel", rotary_dim=8),
    _f("codegen", "CodeGen", _GPT, "head bias, fused QKV in parts", rotary_dim=8),
    _f("gpt-bigcode", "GPTBigCode", _GPT, "one key head, learned positions"),
    Family(
        "gpt-neo",
        "GPTNeoConfig",
        {
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 64,
            "num_layers": 2,
            "attention_types": [[["global", "local"], 1]],
            "num_heads": 4,
            "window_size": 8,
            "max_position_embeddings": 64,
            **_ENDS,
        },
        "adapter; unscaled scores, mixed windows",
    ),
    _f("gpt-neox", "GPTNeoX", _MHA, "parallel, partial rotary"),
    _f("gpt-neox-japanese", "GPTNeoXJapanese", _MHA, "adapter", intermediate_multiple_size=2),
    _f("openai-gpt", "OpenAIGPT", _GPT, "adapter; no cache of its own"),
    Family(
        "opt",
        "OPTConfig",
        {
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 64,
            "ffn_dim": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 64,
            "word_embed_proj_dim": 48,
            **_ENDS,
        },
        "embedding size ≠ hidden size, position offset",
    ),
    Family(
        "bloom",
        "BloomConfig",
        {"vocab_size": VOCAB_SIZE, "hidden_size": 64, "n_layer": 2, "n_head": 4, **_ENDS},
        "adapter; ALiBi",
    ),
    Family(
        "bloom-6-heads",
        "BloomConfig",
        {"vocab_size": VOCAB_SIZE, "hidden_size": 96, "n_layer": 2, "n_head": 6, **_ENDS},
        "adapter; ALiBi, heads not a power of two",
    ),
    Family(
        "mpt",
        "MptConfig",
        {
            "vocab_size": VOCAB_SIZE,
            "d_model": 64,
            "n_layers": 2,
            "n_heads": 4,
            "max_seq_len": 64,
            "attn_config": {"clip_qkv": 3.0},
            **_ENDS,
        },
        "adapter; ALiBi, clipped QKV",
    ),
    Family(
        "mpt-6-heads",
        "MptConfig",
        {
            "vocab_size": VOCAB_SIZE,
            "d_model": 96,
            "n_layers": 2,
            "n_heads": 6,
            "max_seq_len": 64,
            **_ENDS,
        },
        "adapter; ALiBi, heads not a power of two",
    ),
    Family("falcon", "FalconConfig", _FALCON, "adapter; rotary, one key head, parallel"),
    Family(
        "falcon-alibi",
        "FalconConfig",
        _FALCON
        | {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True}
        | {"hidden_size": 96, "num_attention_heads": 12},
        "adapter; ALiBi in bfloat16",
        reference="sdpa",
    ),
    Family(
        "falcon-grouped",
        "FalconConfig",
        _FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2},
        "adapter; grouped queries cached as groups",
    ),
    _f("ctrl", "CTRL", _GPT, "head bias and tied", dff=96),
    Family(
        "xglm",
        "XGLMConfig",
        {
            "vocab_size": VOCAB_SIZE,
            "d_model": 64,
            "ffn_dim": 96,
            "num_layers": 2,
            "attention_heads": 4,
            "max_position_embeddings": 64,
            **_ENDS,
        },
        "adapter; sinusoidal positions",
    ),
    _f("biogpt", "BioGpt", _MHA, "learned positions with offset"),
    _f("granite", "Granite", _LLAMA, "logits divided", logits_scaling=6.0),
    _f("granite-swa", "GraniteSWA", _LLAMA, "mixed windows", logits_scaling=6.0, **_MIXED),
    _f("hyperclovax", "HyperCLOVAX", _LLAMA, "logits multiplied", logits_scaling=6.0),
    _f("cohere", "Cohere", _LLAMA, "logits multiplied, parallel", logit_scale=0.25),
    _f("cohere2", "Cohere2", _LLAMA, "windows, no rotary on some", logit_scale=0.25, **_MIXED),
    _f("olmo", "Olmo", _MHA, "norms without weights", clip_qkv=2.0),
    _f("olmo2", "Olmo2", _LLAMA, "norms behind"),
    _f("olmo3", "Olmo3", _LLAMA, "mixed windows", **_MIXED),
    _f("stablelm", "StableLm", _LLAMA, "parallel, partial rotary", use_parallel_residual=True),
    _f("starcoder2", "Starcoder2", _LLAMA, "window, layer norms", sliding_window=8),
    _f("smollm3", "SmolLM3", _LLAMA, "no rotary on some", no_rope_layers=[1, 0]),
    _f("nemotron", "Nemotron", _LLAMA, "relu2, partial rotary"),
    _f("persimmon", "Persimmon", _MHA, "fused QKV, norms per head"),
    _f("nanochat", "NanoChat", _LLAMA, "softcap on logits", final_logit_softcapping=4.0),
    _f("glm", "Glm", _LLAMA, "interleaved partial rotary"),
    _f("glm4", "Glm4", _LLAMA, "norms behind"),
    _f("helium", "Helium", _LLAMA, "interleaved rotary"),
    _f("exaone4", "Exaone4", _LLAMA, "windows, no rotary on some", **_MIXED),
    _f("arcee", "Arcee", _LLAMA, "relu2"),
    _f("seed-oss", "SeedOss", _LLAMA, "biases"),
    _f("cwm", "Cwm", _LLAMA, "mixed windows", bos_token_id=0, **_MIXED),
    _f("apertus", "Apertus", _LLAMA, "xIELU"),
    _f("ernie4.5", "Ernie4_5", _LLAMA, "interleaved rotary, tied"),
    _f("hunyuan-dense", "HunYuanDenseV1", _LLAMA, "norms behind rotary"),
    _f("jais2", "Jais2", _LLAMA, "relu2, layer norms"),
    _f("bitnet", "BitNet", _LLAMA, "norms inside"),
    _f(
        "modernbert-decoder",
        "ModernBertDecoder",
        _LLAMA,
        "dense and norm before the head, windows",
        local_attention=16,
        bos_token_id=0,
        cls_token_id=0,
        sep_token_id=0,
        layer_types=["sliding_attention", "full_attention"],
    ),
    _f("minicpm3", "MiniCPM3", _LLAMA, "latent attention, scaled before head", **_MLA),
    _f("youtu", "Youtu", _LLAMA, "latent attention", **_MLA),
)

_ROUTED = (
    _moe("mixtral", "Mixtral", "softmax then top-k"),
    _moe("qwen2-moe", "Qwen2Moe", "shared expert", shared_expert_intermediate_size=48),
    _moe("qwen3-moe", "Qwen3Moe", "weights not normalised"),
    _moe("olmoe", "Olmoe", "clipped QKV", clip_qkv=2.0),
    _moe("flex-olmo", "FlexOlmo", "norms behind"),
    _moe(
        "gpt-oss",
        "GptOss",
        "clamped swiglu with biases, sinks, windows",
        **_MIXED,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
    _moe("granitemoe", "GraniteMoe", "top-k then softmax", logits_scaling=6.0),
    _moe("granitemoe-shared", "GraniteMoeShared", "shared", shared_intermediate_size=48),
    _moe("phimoe", "Phimoe", "sparse mixer, head bias", lm_head_bias=True),
    _moe(
        "deepseek-v2",
        "DeepseekV2",
        "latent attention, shared experts",
        **_MLA,
        n_shared_experts=1,
        first_k_dense_replace=1,
        topk_method="greedy",
    ),
    _moe(
        "deepseek-v3",
        "DeepseekV3",
        "latent attention, sigmoid router in groups",
        **_MLA,
        n_group=2,
        n_routed_experts=8,
        num_local_experts=8,
        first_k_dense_replace=1,
        num_mtp_layers=0,
    ),
    _moe(
        "glm4-moe-lite",
        "Glm4MoeLite",
        "latent attention",
        **_MLA,
        mlp_layer_types=["dense", "sparse"],
    ),
    _moe("glm4-moe", "Glm4Moe", "sigmoid router", first_k_dense_replace=1, num_mtp_layers=0),
    _moe("dots1", "Dots1", "sigmoid router", n_shared_experts=1, sliding_window=None),
    _moe(
        "ernie4.5-moe",
        "Ernie4_5_Moe",
        "corrected router",
        moe_num_experts=6,
        moe_k=2,
        moe_num_shared_experts=1,
    ),
    _moe("minimax-m2", "MiniMaxM2", "sigmoid router, partial rotary"),
    _moe("hunyuan-moe", "HunYuanMoEV1", "shared expert", moe_topk=2),
    _moe("exaone-moe", "ExaoneMoe", "windows", mlp_layer_types=["dense", "sparse"], **_MIXED),
    _moe("afmoe", "Afmoe", "gated attention", num_dense_layers=1, num_shared_experts=1, **_MIXED),
    Family(
        "dbrx",
        "DbrxConfig",
        {
            "vocab_size": VOCAB_SIZE,
            "d_model": 64,
            "n_heads": 4,
            "n_layers": 2,
            "max_seq_len": 64,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 3.0, "rope_theta": 10000.0},
            "ffn_config": {
                "hidden_size": 64,
                "ffn_hidden_size": 48,
                "moe_num_experts": 6,
                "moe_top_k": 2,
            },
            **_ENDS,
        },
        "adapter for its experts",
        routed=True,
    ),
    # All experts chosen: no rank is near another, so half precision can be compared.
    Family("mixtral-all", "MixtralConfig", _MOE | {"num_experts_per_tok": 6}, "every expert"),
    Family(
        "gpt-oss-all",
        "GptOssConfig",
        _MOE
        | _MIXED
        | {
            "num_experts_per_tok": 6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
        "every expert",
    ),
)

_RECURRENT = tuple(
    Family(name, config, settings, shows, routed=routed)
    for name, config, settings, shows, routed in RECURRENT
)
ZOO: tuple[Family, ...] = (*_DENSE, *_ROUTED, *_RECURRENT)

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
        "XLMWithLMHeadModel",
    ),
    Refusal("dory", "DoryConfig", _LLAMA | {"n_input_layers": 1, "n_output_layers": 0}, "Dory"),
    Refusal("llama4", "Llama4TextConfig", _LLAMA, "Llama4ForCausalLM"),
    Refusal("jetmoe", "JetMoeConfig", _LLAMA | {"num_local_experts": 4}, "JetMoeForCausalLM"),
    Refusal("diffllama", "DiffLlamaConfig", _LLAMA, "DiffLlamaForCausalLM is refused"),
    Refusal("doge", "DogeConfig", _LLAMA, "DogeForCausalLM is refused"),
    Refusal(
        "musicgen",
        "MusicgenDecoderConfig",
        _LLAMA | {"num_codebooks": 2, "ffn_dim": 48},
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
    Refusal("gpt2-double-heads", "GPT2Config", _GPT, "GPT2DoubleHeads", "GPT2DoubleHeadsModel"),
)


def save_checkpoint(family: Family | Refusal, folder: Path) -> Path:
    """A random checkpoint with its tokenizer."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, family.config)(**family.settings)
    kind = getattr(family, "model", "")
    build = getattr(transformers, kind)._from_config if kind else None
    model = (build or transformers.AutoModelForCausalLM.from_config)(config).eval()
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith("correction_bias"):
                tensor.normal_(0.0, 0.1)
            elif not isinstance(tensor, torch.nn.Parameter):
                continue
            elif tensor.dim() > 1:
                tensor.normal_(0.0, 0.2)
            elif name.endswith(("bias", "sinks")):
                tensor.normal_(0.0, 0.5)
            else:
                tensor.add_(torch.randn_like(tensor), alpha=0.1)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder
