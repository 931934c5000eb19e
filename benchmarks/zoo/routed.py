"""Families with routed experts."""

from __future__ import annotations

from benchmarks.zoo.family import ENDS, MIXED, MLA, MOE, Family, routed
from tests.conftest import VOCAB_SIZE

__all__ = ["ROUTED"]

ROUTED: tuple[Family, ...] = (
    routed("mixtral", "Mixtral", "softmax then top-k"),
    routed("qwen2-moe", "Qwen2Moe", "shared expert", shared_expert_intermediate_size=48),
    routed("qwen3-moe", "Qwen3Moe", "weights not normalised"),
    routed("olmoe", "Olmoe", "clipped QKV", clip_qkv=2.0),
    routed("flex-olmo", "FlexOlmo", "norms behind"),
    routed(
        "gpt-oss",
        "GptOss",
        "clamped swiglu with biases, sinks, windows",
        **MIXED,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
    routed("granitemoe", "GraniteMoe", "top-k then softmax", logits_scaling=6.0),
    routed("granitemoe-shared", "GraniteMoeShared", "shared", shared_intermediate_size=48),
    routed("phimoe", "Phimoe", "sparse mixer, head bias", lm_head_bias=True),
    routed(
        "deepseek-v2",
        "DeepseekV2",
        "latent attention, shared experts",
        **MLA,
        n_shared_experts=1,
        first_k_dense_replace=1,
        topk_method="greedy",
    ),
    routed(
        "deepseek-v3",
        "DeepseekV3",
        "latent attention, sigmoid router in groups",
        **MLA,
        n_group=2,
        n_routed_experts=8,
        num_local_experts=8,
        first_k_dense_replace=1,
        num_mtp_layers=0,
    ),
    routed(
        "glm4-moe-lite",
        "Glm4MoeLite",
        "latent attention",
        **MLA,
        mlp_layer_types=["dense", "sparse"],
    ),
    routed("glm4-moe", "Glm4Moe", "sigmoid router", first_k_dense_replace=1, num_mtp_layers=0),
    routed("dots1", "Dots1", "sigmoid router", n_shared_experts=1, sliding_window=None),
    routed(
        "ernie4.5-moe",
        "Ernie4_5_Moe",
        "corrected router",
        moe_num_experts=6,
        moe_k=2,
        moe_num_shared_experts=1,
    ),
    routed("minimax-m2", "MiniMaxM2", "sigmoid router, partial rotary"),
    routed("hunyuan-moe", "HunYuanMoEV1", "shared expert", moe_topk=2),
    routed("exaone-moe", "ExaoneMoe", "windows", mlp_layer_types=["dense", "sparse"], **MIXED),
    routed("afmoe", "Afmoe", "gated attention", num_dense_layers=1, num_shared_experts=1, **MIXED),
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
            **ENDS,
        },
        "adapter for its experts",
        routed=True,
    ),
    # All experts chosen: no rank is near another, so half precision can be compared.
    Family("mixtral-all", "MixtralConfig", MOE | {"num_experts_per_tok": 6}, "every expert"),
    Family(
        "gpt-oss-all",
        "GptOssConfig",
        MOE
        | MIXED
        | {
            "num_experts_per_tok": 6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
        "every expert",
    ),
)
