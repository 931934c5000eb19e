"""Tiny configurations of families whose layers keep states: rows for `benchmarks.zoo`."""

from __future__ import annotations

from typing import Any

from tests.conftest import VOCAB_SIZE

__all__ = ["RECURRENT"]

_Settings = dict[str, Any]

_BASE: _Settings = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
_HYBRID = _BASE | {
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 80,
}
_HEADS: _Settings = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_expand": 2,
}
_LINEAR: _Settings = {
    "num_hidden_layers": 2,
    "head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
}
_EXPERTS: _Settings = {"num_experts": 6, "num_local_experts": 6, "num_experts_per_tok": 2}

# Name, configuration class, settings, what it is here for, whether it has routed experts.
RECURRENT: tuple[tuple[str, str, _Settings, str, bool], ...] = (
    (
        "lfm2",
        "Lfm2Config",
        _HYBRID | {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]},
        "short convolutions and attention",
        False,
    ),
    (
        "lfm2-moe",
        "Lfm2MoeConfig",
        _HYBRID
        | _EXPERTS
        | {
            "num_hidden_layers": 3,
            "layer_types": ["conv", "full_attention", "conv"],
            "moe_intermediate_size": 48,
            "num_dense_layers": 1,
        },
        "short convolutions, attention, experts",
        True,
    ),
    (
        "mamba",
        "MambaConfig",
        _BASE | {"num_hidden_layers": 2, "state_size": 8},
        "selective scan, no attention",
        False,
    ),
    (
        "falcon-mamba",
        "FalconMambaConfig",
        _BASE | {"num_hidden_layers": 2, "state_size": 8},
        "norms inside the scan",
        False,
    ),
    (
        "mamba2",
        "Mamba2Config",
        _BASE
        | {
            "num_hidden_layers": 2,
            "num_heads": 8,
            "head_dim": 8,
            "state_size": 16,
            "n_groups": 2,
            "chunk_size": 16,
            "time_step_limit": (0.3, 1.0),
        },
        "state-space dual, bounded time step",
        False,
    ),
    (
        "jamba",
        "JambaConfig",
        _HYBRID
        | {
            "num_hidden_layers": 3,
            "num_experts": 1,
            "attn_layer_period": 3,
            "attn_layer_offset": 1,
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
        },
        "selective scan beside attention without positions",
        False,
    ),
    (
        "jamba-moe",
        "JambaConfig",
        _HYBRID
        | {
            "num_hidden_layers": 3,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "attn_layer_period": 3,
            "attn_layer_offset": 1,
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
        },
        "selective scan, attention, experts",
        True,
    ),
    (
        "bamba",
        "BambaConfig",
        _HYBRID | _HEADS | {"num_hidden_layers": 3, "attn_layer_indices": [1]},
        "state-space dual beside attention",
        False,
    ),
    (
        "granite-hybrid",
        "GraniteMoeHybridConfig",
        _HYBRID
        | _HEADS
        | {
            "num_hidden_layers": 3,
            "shared_intermediate_size": 64,
            "num_local_experts": 0,
            "layer_types": ["mamba", "attention", "mamba"],
        },
        "state-space dual beside attention, multipliers",
        False,
    ),
    (
        "falcon-h1",
        "FalconH1Config",
        _HYBRID | _HEADS | {"num_hidden_layers": 2, "mamba_d_ssm": 64},
        "state-space dual and attention in one layer",
        False,
    ),
    (
        "zamba2",
        "Zamba2Config",
        _HYBRID
        | {
            "num_key_value_heads": 4,
            "num_hidden_layers": 4,
            "attention_head_dim": 16,
            "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
            "num_mem_blocks": 1,
            "mamba_headdim": 8,
            "n_mamba_heads": 8,
            "mamba_ngroups": 2,
            "mamba_d_state": 16,
            "use_shared_attention_adapter": True,
            "adapter_rank": 4,
            "use_mem_rope": True,
        },
        "shared attention block with adapters",
        False,
    ),
    (
        "nemotron-h",
        "NemotronHConfig",
        _HYBRID
        | {
            "num_hidden_layers": 4,
            "head_dim": 8,
            "hybrid_override_pattern": "M*-M",
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "n_groups": 2,
            "ssm_state_size": 16,
        },
        "layers that keep nothing",
        False,
    ),
    ("qwen3.5", "Qwen3_5TextConfig", _HYBRID | _LINEAR, "gated delta rule", False),
    (
        "qwen3-next",
        "Qwen3NextConfig",
        _HYBRID | _LINEAR | {"num_experts": 0, "mlp_only_layers": [0, 1]},
        "gated delta rule, gated attention",
        False,
    ),
    (
        "recurrent-gemma",
        "RecurrentGemmaConfig",
        _BASE
        | {
            "intermediate_size": 64,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "lru_width": 32,
            "attention_window_size": 8,
        },
        "linear recurrence, window, softcap",
        False,
    ),
)
