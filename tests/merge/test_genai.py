"""genai_config.json, field by field."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from headport.bundle import Bundle
from headport.errors import MergeError
from headport.merge.genai import genai_config, left_out


def manifest_of(path: Path, **defaults: object) -> object:
    manifest = Bundle.open(path, verify=False).manifest
    return msgspec.structs.replace(manifest, defaults={"eos_token_id": [0, 5], **defaults})


def test_a_portable_bundle(tiny_bundle: Path) -> None:
    manifest = manifest_of(tiny_bundle, temperature=0.7, do_sample=True)
    found = genai_config(manifest, {"bos_token_id": 3}, "model.onnx", 257)
    model, decoder = found["model"], found["model"]["decoder"]
    assert (model["bos_token_id"], model["eos_token_id"], model["pad_token_id"]) == (3, [0, 5], 0)
    assert (model["type"], model["vocab_size"], model["context_length"]) == ("decoder", 257, 64)
    assert decoder["session_options"]["session.qdq_matmulnbits_accuracy_level"] == "0"
    assert decoder["session_options"]["provider_options"] == []
    assert (decoder["head_size"], decoder["num_key_value_heads"]) == (16, 2)
    assert (decoder["num_attention_heads"], decoder["num_hidden_layers"]) == (4, 2)
    assert decoder["inputs"]["past_key_names"] == "past_key_values.%d.key"
    search = found["search"]
    assert (search["temperature"], search["do_sample"], search["top_k"]) == (0.7, True, 0)
    assert search["max_length"] == 64 and not search["past_present_share_buffer"]


def test_a_lowered_bundle_shares_its_buffers(tiny_lowered: Path) -> None:
    found = genai_config(manifest_of(tiny_lowered), {}, "model.onnx", 257)
    assert found["search"]["past_present_share_buffer"]
    assert "bos_token_id" not in found["model"]


def test_without_an_end_it_is_refused(tiny_bundle: Path) -> None:
    with pytest.raises(MergeError, match="eos_token_id"):
        genai_config(manifest_of(tiny_bundle, eos_token_id=None), {}, "model.onnx", 257)


def test_defaults_without_a_field_are_named(tiny_bundle: Path) -> None:
    manifest = manifest_of(tiny_bundle, suppress_tokens=[7], min_p=0.1, top_k=3, max_length=9)
    assert left_out(manifest) == ["min_p", "suppress_tokens"]
    assert left_out(manifest_of(tiny_bundle, bad_words_ids=[])) == []
