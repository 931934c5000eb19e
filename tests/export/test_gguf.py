"""A `.gguf` file, written here field by field, becomes a bundle like any other checkpoint."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import transformers

from headport.errors import CheckpointError
from headport.export.checkpoint import find_checkpoint, load_model
from headport.export.command import Options, export
from tests.conftest import TEXTS

V, H, INNER, LAYERS, HEADS, KV = 258, 32, 64, 1, 2, 1


def byte_tokens() -> list[str]:
    """The 256 byte tokens of a byte-level vocabulary, one special token and one merge."""
    from tokenizers import pre_tokenizers

    return ["<|end|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "ab"]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A one-layer Llama with a tied head, stored as Q8_0 and float32."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_license("apache-2.0")
    writer.add_context_length(32)
    writer.add_embedding_length(H)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV)
    writer.add_rope_dimension_count(H // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(V)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(byte_tokens())
    writer.add_token_types([3] + [1] * (V - 1))
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(0)
    writer.add_bos_token_id(0)
    rng = np.random.default_rng(0)
    size = H // HEADS
    shapes = {
        "token_embd": (V, H),
        "blk.0.attn_q": (H, H),
        "blk.0.attn_k": (KV * size, H),
        "blk.0.attn_v": (KV * size, H),
        "blk.0.attn_output": (H, H),
        "blk.0.ffn_gate": (INNER, H),
        "blk.0.ffn_up": (INNER, H),
        "blk.0.ffn_down": (H, INNER),
    }
    for name, shape in shapes.items():
        weight = rng.normal(0, 0.2, shape).astype(np.float32)
        kind = gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(f"{name}.weight", gguf.quantize(weight, kind), raw_dtype=kind)
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", rng.normal(1, 0.1, H).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_gguf_file_is_exported(file: Path, tmp_path: Path) -> None:
    bundle = export(Options(model=str(file), output=tmp_path / "bundle"))
    manifest = bundle.manifest
    assert (manifest.provenance.checkpoint, manifest.provenance.format) == ("tiny.gguf", "gguf")
    assert manifest.license.id == "apache-2.0"
    assert manifest.heads["lm"].tied
    assert (manifest.model.layers, manifest.model.max_context) == (LAYERS, 32)
    folder, name = file.parent, file.name
    theirs = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=name)
    ours = transformers.AutoTokenizer.from_pretrained(bundle.path)
    for text in TEXTS:
        assert ours(text)["input_ids"] == theirs(text)["input_ids"]
    config = transformers.AutoConfig.from_pretrained(bundle.path)
    assert config.architectures == ["LlamaForCausalLM"]
    for path in bundle.path.glob("*.json"):
        assert str(folder) not in path.read_text()


def test_a_damaged_gguf_file_is_refused(file: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(file.read_bytes()[:2000])
    with pytest.raises(CheckpointError, match=r"cut\.gguf"):
        load_model(find_checkpoint(str(cut)))
