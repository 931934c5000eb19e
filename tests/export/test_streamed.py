"""A model whose weights stay in their files is the model that was loaded whole."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from headport.errors import CheckpointError
from headport.export import streamed
from headport.export.checkpoint import find_checkpoint, load_model
from headport.export.deferred import DeferredTensor
from headport.export.streamed import load_streamed
from tests.conftest import save_model

WEIGHTS = "model.safetensors"
SMALL: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
}


def edit(
    folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
) -> None:
    save_file(change(load_file(folder / WEIGHTS)), folder / WEIGHTS, {"format": "pt"})


def half(folder: Path) -> None:
    edit(folder, lambda tensors: {k: v.bfloat16() for k, v in tensors.items()})


def shards(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    names = {}
    for i, name in enumerate(sorted(tensors)):
        file = f"model-{i % 3}.safetensors"
        names[name] = file
    for file in set(names.values()):
        part = {n: tensors[n] for n, f in names.items() if f == file}
        save_file(part, folder / file, {"format": "pt"})
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))


def without_prefix(folder: Path) -> None:
    edit(folder, lambda tensors: {k.removeprefix("model."): v for k, v in tensors.items()})


def head_twice(folder: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}

    edit(folder, change)


def as_it_is(_folder: Path) -> None:
    pass


CASES: dict[str, tuple[str, dict[str, Any], Callable[[Path], None]]] = {
    "bfloat16": ("LlamaConfig", {}, half),
    "shards": ("LlamaConfig", {}, shards),
    "no base prefix": ("LlamaConfig", {}, without_prefix),
    "tied": ("LlamaConfig", {"tie_word_embeddings": True}, as_it_is),
    "tied, stored twice": ("LlamaConfig", {"tie_word_embeddings": True}, head_twice),
    "Mixtral, experts apart": ("MixtralConfig", {}, half),
    "Deepseek, experts apart, buffers": ("DeepseekV3Config", {}, as_it_is),
    "GPT-OSS": ("GptOssConfig", {"head_dim": 16}, as_it_is),
}


@pytest.mark.parametrize("case", CASES)
def test_every_weight_has_the_value_it_has_when_all_is_loaded(case: str, tmp_path: Path) -> None:
    kind, changes, prepare = CASES[case]
    folder = save_model(tmp_path / "model", getattr(transformers, kind)(**SMALL | changes))
    prepare(folder)
    checkpoint = find_checkpoint(str(folder))
    model, road = load_streamed(checkpoint)
    assert (road.name, road.reason, road.unused) == ("streamed", "", ())
    whole = load_model(checkpoint)
    found, expected = dict(model.named_parameters()), dict(whole.named_parameters())
    assert list(found) == list(expected)
    for name, parameter in found.items():
        assert isinstance(parameter, DeferredTensor)
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter.evaluate(), expected[name])
    for (name, buffer), (_, other) in zip(
        model.named_buffers(), whole.named_buffers(), strict=True
    ):
        assert not isinstance(buffer, DeferredTensor)
        assert torch.equal(buffer, other), name
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    with torch.no_grad():
        assert torch.equal(model(ids).logits, whole(ids).logits)


@pytest.fixture
def folder(tiny_llama: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_llama, tmp_path / "llama"))


def test_buffers_come_from_the_file(tmp_path: Path) -> None:
    config = transformers.DeepseekV3Config(**SMALL)
    folder = save_model(tmp_path / "model", config)
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    edit(folder, lambda tensors: tensors | {bias: torch.arange(4.0)})
    model, _ = load_streamed(find_checkpoint(str(folder)))
    assert dict(model.named_buffers())[bias].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: {k: v for k, v in t.items() if k != "model.norm.weight"}, "lacks: model.norm"),
        (lambda t: t | {"lm_head.bias": torch.ones(257)}, "no place for: lm_head.bias"),
        (lambda t: t | {"model.norm.weight": torch.ones(63)}, "another shape: model.norm.weight"),
        (
            lambda t: t | {"model.norm.weight": torch.full((64,), torch.nan)},
            "NaN or infinity: model.norm.weight",
        ),
    ],
)
def test_gaps_are_errors(folder: Path, change: Any, message: str) -> None:
    edit(folder, change)
    with pytest.raises(CheckpointError, match=message):
        load_streamed(find_checkpoint(str(folder)))


def test_tensors_the_library_drops_in_silence_are_listed(folder: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"  # as old checkpoints hold it
    edit(folder, lambda tensors: tensors | {name: torch.ones(8)})
    _, road = load_streamed(find_checkpoint(str(folder)))
    assert road.unused == (name,)


def test_a_loader_that_looks_at_values_gets_the_whole_model(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = streamed.load_pretrained

    def looking(*arguments: Any) -> Any:
        model = load(*arguments)
        weight = model.lm_head.weight
        if isinstance(weight, DeferredTensor):
            float(weight.sum())
        return model

    monkeypatch.setattr(
        streamed, "load_pretrained", lambda *arguments: swallowed(looking, arguments)
    )
    model, road = load_streamed(find_checkpoint(str(folder)))
    assert road.name == "loaded"
    assert "depends on the values of a weight" in road.reason
    assert not isinstance(model.lm_head.weight, DeferredTensor)


def swallowed(function: Any, arguments: Any) -> Any:
    try:
        return function(*arguments)
    except RuntimeError as error:
        raise CheckpointError("it does not load") from error


@pytest.mark.parametrize("key", ["quantization_config"])
def test_quantised_checkpoints_are_read_whole(
    folder: Path, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = json.loads((folder / "config.json").read_text()) | {key: {"quant_method": "own"}}
    (folder / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(streamed, "load_model", lambda *_: "whole")
    model, road = load_streamed(find_checkpoint(str(folder)))
    assert (model, road.name) == ("whole", "loaded")
    assert "quantised" in road.reason
