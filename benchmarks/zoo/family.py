"""What a configuration of the zoo is, the settings they share, and a checkpoint of one."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tests.conftest import VOCAB_SIZE, save_tokenizer

__all__ = [
    "ENDS",
    "FALCON",
    "GPT",
    "LLAMA",
    "MHA",
    "MIXED",
    "MLA",
    "MOE",
    "Family",
    "Refusal",
    "Settings",
    "dense",
    "routed",
    "save_checkpoint",
]

Settings = dict[str, Any]

ENDS: Settings = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0}
LLAMA: Settings = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    **ENDS,
}
MHA = LLAMA | {"num_key_value_heads": 4}
GPT: Settings = {
    "vocab_size": VOCAB_SIZE,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    **ENDS,
}
MIXED: Settings = {
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"],
}
MOE = LLAMA | {
    "moe_intermediate_size": 48,
    "num_experts": 6,
    "num_local_experts": 6,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
}
MLA: Settings = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "head_dim": 8,
}
FALCON: Settings = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    **ENDS,
}


@dataclass(frozen=True)
class Family:
    """One configuration, and what its row of the table must say besides."""

    name: str
    config: str  # class in transformers
    settings: Settings = field(repr=False)
    shows: str = ""  # the feature it is here for
    reference: Literal["eager", "sdpa"] = "eager"
    routed: bool = False  # has experts of which only some are chosen


@dataclass(frozen=True)
class Refusal:
    """A configuration that must be refused, with what its message must say."""

    name: str
    config: str
    settings: Settings = field(repr=False)
    says: str = ""
    model: str = ""  # class to build, where it is not the config's causal LM


def dense(name: str, config: str, base: Settings, shows: str = "", **changes: Any) -> Family:
    """A configuration without routed experts, of `<config>Config`."""
    return Family(name, f"{config}Config", base | changes, shows)


def routed(name: str, config: str, shows: str = "", **changes: Any) -> Family:
    """A configuration with routed experts, of `<config>Config`."""
    return Family(name, f"{config}Config", MOE | changes, shows, routed=True)


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
