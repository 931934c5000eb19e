"""Random Llamas of any size as checkpoints, written shard by shard.

Nothing of a model but one shard is in memory at a time, so a checkpoint may be larger than that.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.conftest import llama_config

__all__ = ["Written", "write_checkpoint"]

_SHARD_BYTES = 1 << 30
_NAMES = {
    "self_attn.q_proj": ("Q", "H"),
    "self_attn.k_proj": ("KV", "H"),
    "self_attn.v_proj": ("KV", "H"),
    "self_attn.o_proj": ("H", "Q"),
    "mlp.gate_proj": ("I", "H"),
    "mlp.up_proj": ("I", "H"),
    "mlp.down_proj": ("H", "I"),
    "input_layernorm": ("H",),
    "post_attention_layernorm": ("H",),
}


@dataclass(frozen=True)
class Written:
    """What a checkpoint holds."""

    parameters: int
    bytes: int
    largest: int  # elements of the largest tensor


def write_checkpoint(folder: Path, **sizes: Any) -> Written:
    """Write a sharded random checkpoint in bfloat16, with a tokenizer of its size.

    Rows are scaled by the root of their length, so that activations keep their size whatever the
    sizes are. The embedding is tied.

    Args:
        folder: An existing folder.
        sizes: Of `LlamaConfig`; `vocab_size` from 257 up.
    """
    config = llama_config(tie_word_embeddings=True, **sizes)
    shard: dict[str, torch.Tensor] = {}
    names: dict[str, str] = {}
    parameters = largest = written = 0

    def flush() -> None:
        file = f"model-{len(set(names.values())) + 1:05d}.safetensors"
        save_file(shard, folder / file, {"format": "pt"})
        names.update(dict.fromkeys(shard, file))
        shard.clear()

    for name, tensor in _tensors(config):
        shard[name] = tensor
        parameters += tensor.numel()
        largest = max(largest, tensor.numel())
        written += tensor.nbytes
        if sum(t.nbytes for t in shard.values()) >= _SHARD_BYTES:
            flush()
    flush()
    index = {"metadata": {"total_size": written}, "weight_map": names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    _save_tokenizer(folder, config.vocab_size)
    return Written(parameters, written, largest)


def _tensors(config: Any) -> Iterator[tuple[str, torch.Tensor]]:
    sizes = {
        "H": config.hidden_size,
        "I": config.intermediate_size,
        "Q": config.num_attention_heads * config.head_dim,
        "KV": config.num_key_value_heads * config.head_dim,
    }
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        x = torch.empty(shape, dtype=torch.bfloat16)
        return x.normal_(0.0, 0.6 * shape[-1] ** -0.5, generator=generator)

    yield "model.embed_tokens.weight", random(config.vocab_size, config.hidden_size)
    for layer in range(config.num_hidden_layers):
        for name, dims in _NAMES.items():
            shape = [sizes[d] for d in dims]
            value = random(*shape) if len(shape) == 2 else torch.ones(shape, dtype=torch.bfloat16)
            yield f"model.layers.{layer}.{name}.weight", value
    yield "model.norm.weight", torch.ones(config.hidden_size, dtype=torch.bfloat16)


def _save_tokenizer(folder: Path, size: int) -> None:
    """A byte-level BPE with exactly `size` tokens: bytes, then pairs, then triples of them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = ["<|end|>", *alphabet]
    merges: list[tuple[str, str]] = []
    shortest = 1  # the piece that is lengthened next
    while len(pieces) < size:
        longer = [(pieces[shortest], last) for last in alphabet[: size - len(pieces)]]
        merges += longer
        pieces += ["".join(pair) for pair in longer]
        shortest += 1
    inner = Tokenizer(models.BPE({piece: n for n, piece in enumerate(pieces)}, merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<|end|>", pad_token="<|end|>"
    ).save_pretrained(folder)
