"""A Llama checkpoint as GGUF files for llama.cpp, rounded by llama.cpp's own quantiser.

    PYTHON benchmarks/peers/make_gguf.py CHECKPOINT FOLDER

runs in an interpreter with `llama-cpp-python`, `gguf` and `safetensors`, and writes `f32.gguf` (the
checkpoint's own values), `q8.gguf` (Q8_0), `q4.gguf` (Q4_0, with the larger type that the quantiser
gives a head by default) and `q4_pure.gguf` (Q4_0 everywhere). They hold no tokenizer: benchmarks
feed ids. Only plain Llama checkpoints are converted; anything that they would need beyond is
refused by name.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np
import numpy.typing as npt
from safetensors import safe_open

__all__ = ["main"]

Float32 = npt.NDArray[np.float32]

_EXACT = "f32.gguf"
# File → type of the file, and whether every matrix has that type.
_ROUNDED = {
    "q8.gguf": (llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0, False),
    "q4.gguf": (llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0, False),
    "q4_pure.gguf": (llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0, True),
}
_TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_IN_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_EXPECTED = {
    "model_type": "llama",
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
}


def main() -> int:
    """Write the files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("folder", type=Path)
    found = parser.parse_args()
    config = json.loads((found.checkpoint / "config.json").read_text(encoding="utf-8"))
    _refuse(config)
    found.folder.mkdir(parents=True, exist_ok=True)
    _write(config, found.checkpoint, found.folder / _EXACT)
    for name, (kind, pure) in _ROUNDED.items():
        _quantise(found.folder / _EXACT, found.folder / name, kind, pure)
    return 0


def _refuse(config: dict[str, Any]) -> None:
    odd = [
        f"{key} is {config[key]!r}, {value!r} was expected"
        for key, value in _EXPECTED.items()
        if config.get(key, value) != value
    ]
    rope = _rope(config).get("rope_type", "default")
    if rope != "default":
        odd.append(f"rope_type is {rope!r}, 'default' was expected")
    if odd:
        sys.exit(f"make_gguf: {'; '.join(odd)}; use llama.cpp's convert_hf_to_gguf.py")


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    return config.get("rope_parameters") or config.get("rope_scaling") or {}


def _write(config: dict[str, Any], checkpoint: Path, file: Path) -> None:
    heads = config["num_attention_heads"]
    head_size = config.get("head_dim") or config["hidden_size"] // heads
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_size)
    writer.add_value_length(head_size)
    writer.add_rope_dimension_count(head_size)
    writer.add_rope_freq_base(_rope(config).get("rope_theta") or config.get("rope_theta", 10_000.0))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_tokenizer_model("none")
    for name, values in _tensors(config, checkpoint, head_size):
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _tensors(
    config: dict[str, Any], checkpoint: Path, head_size: int
) -> Iterator[tuple[str, Float32]]:
    turned = ("attn_q", "attn_k")
    for file in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(file, "np") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (safe_open is no mapping)
                if name == "lm_head.weight" and config["tie_word_embeddings"]:
                    continue
                values = tensors.get_tensor(name).astype(np.float32)
                if name in _TOP:
                    yield _TOP[name], values
                    continue
                _, _, layer, part = name.removesuffix(".weight").split(".", 3)
                short = _IN_LAYER[part]
                yield (
                    f"blk.{layer}.{short}.weight",
                    _interleaved(values, head_size) if short in turned else values,
                )


def _interleaved(weight: Float32, head_size: int) -> Float32:
    """Rows of each head so that partners of a rotation lie side by side.

    transformers turns rows i and i + D/2 of a head together, llama.cpp's `llama` rows 2i and 2i + 1
    (`permute` in its convert_hf_to_gguf.py).
    """
    rows, columns = weight.shape
    halves = weight.reshape(rows // head_size, 2, head_size // 2, columns)
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows, columns)


def _quantise(source: Path, target: Path, kind: int, pure: bool) -> None:
    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype, options.pure = kind, pure
    failed = llama_cpp.llama_model_quantize(
        str(source).encode(), str(target).encode(), ctypes.byref(options)
    )
    if failed:
        sys.exit(f"make_gguf: llama.cpp could not write {target}")


if __name__ == "__main__":
    sys.exit(main())
