"""LoRA adapters against PEFT itself: merged, written, validated, and refused if they do not fit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from headport.build import Options as BuildOptions
from headport.build import build
from headport.bundle import Bundle
from headport.errors import CheckpointError, ExportError, ParityError, UsageError
from headport.export.checkpoint import checkpoint_sha256, find_checkpoint, load_model
from headport.export.command import Options, export
from headport.export.tuning.applied import apply_adapter, check_adaptable, put_beside
from headport.export.tuning.files import read_adapter
from headport.export.tuning.lora import LowRank, find_tuned
from headport.runtime import Generator
from headport.validate.command import Options as ValidateOptions
from headport.validate.command import validate
from headport.validate.fitness import check_adapter
from tests.conftest import llama_config, save_model

peft = pytest.importorskip("peft", reason="peft is not installed")

IDS = torch.arange(3, 43).reshape(2, 20) * 5 % 257


def save_adapter(checkpoint: Path, folder: Path, **settings: Any) -> Path:
    """Let PEFT make an adapter whose every tensor shows in the logits, and save it."""
    model = load_model(find_checkpoint(str(checkpoint)))
    torch.manual_seed(1)
    tuned = peft.get_peft_model(model, peft.LoraConfig(**settings))
    with torch.no_grad():
        for name, parameter in tuned.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                parameter.normal_(0.0, 0.15)
    tuned.save_pretrained(folder)
    return folder


def peft_logits(checkpoint: Path, adapter: Path) -> torch.Tensor:
    model = load_model(find_checkpoint(str(checkpoint)))
    tuned = peft.PeftModel.from_pretrained(model, adapter).eval()
    with torch.no_grad():
        return tuned(input_ids=IDS, use_cache=False).logits


KINDS: dict[str, dict[str, Any]] = {
    "attention": {"r": 4, "lora_alpha": 12, "target_modules": ["q_proj", "v_proj"]},
    "patterns": {
        "r": 4,
        "target_modules": r".*layers\.\d+\.(mlp\.down_proj|self_attn\.o_proj)",
        "rank_pattern": {"down_proj": 2, r"layers\.1\.self_attn\.o_proj": 6},
        "alpha_pattern": {"o_proj": 20},
        "use_rslora": True,
    },
    "one layer": {"target_modules": ["gate_proj", "k_proj"], "layers_to_transform": [1]},
    "all": {"target_modules": "all-linear", "r": 2},
    "head": {"target_modules": ["lm_head", "embed_tokens"]},
    "whole": {"target_modules": ["k_proj"], "modules_to_save": ["lm_head", "norm"]},
}


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = llama_config(tie_word_embeddings=True, attention_bias=True)
    return save_model(tmp_path_factory.mktemp("tuned") / "tied", config)


@pytest.fixture(scope="module")
def adapters(tied: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {name: save_adapter(tied, folder / name, **kind) for name, kind in KINDS.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_merged_and_beside_answer_like_peft(kind, tied, adapters):
    expected = peft_logits(tied, adapters[kind])
    plain = load_model(find_checkpoint(str(tied)))
    with torch.no_grad():
        without = plain(input_ids=IDS, use_cache=False).logits
    merged = apply_adapter(plain, adapters[kind])
    with torch.no_grad():
        found = plain(input_ids=IDS, use_cache=False).logits
        with merged.apart():
            apart = plain(input_ids=IDS, use_cache=False).logits
        again = plain(input_ids=IDS, use_cache=False).logits
    limit = 2e-5 * float(expected.abs().max())
    assert (expected - without).abs().max() > 100 * limit  # the adapter shows
    assert (expected - found).abs().max() < limit
    assert (expected - apart).abs().max() < limit
    assert torch.equal(found, again)


def test_transposed_layers_and_scaled_embeddings(tmp_path):
    from transformers import Gemma3TextConfig, GPT2Config

    sizes = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0}
    gpt2 = GPT2Config(vocab_size=257, n_positions=64, n_embd=48, n_layer=1, n_head=3, **sizes)
    gemma = Gemma3TextConfig(
        vocab_size=257,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        **sizes,
    )
    targets = {"gpt2": ["c_attn", "c_fc", "wte"], "gemma": ["embed_tokens", "up_proj"]}
    for name, config in (("gpt2", gpt2), ("gemma", gemma)):
        checkpoint = save_model(tmp_path / name, config)
        adapter = save_adapter(checkpoint, tmp_path / f"{name}-a", target_modules=targets[name])
        expected = peft_logits(checkpoint, adapter)
        model = load_model(find_checkpoint(str(checkpoint)))
        merged = apply_adapter(model, adapter)
        with torch.no_grad():
            found = model(input_ids=IDS, use_cache=False).logits
            with merged.apart():
                apart = model(input_ids=IDS, use_cache=False).logits
        limit = 2e-5 * float(expected.abs().max())
        assert (expected - found).abs().max() < limit
        assert (expected - apart).abs().max() < limit


@pytest.fixture(scope="module")
def tuned_bundle(tied: Path, adapters: dict[str, Path], tmp_path_factory) -> Bundle:
    output = tmp_path_factory.mktemp("bundle") / "tuned"
    return export(Options(model=str(tied), output=output, adapter=adapters["whole"]))


def test_the_written_files_answer_like_peft(tuned_bundle, tied, adapters):
    expected = peft_logits(tied, adapters["whole"])[0].numpy()
    with Generator(tuned_bundle.path) as generator:
        found = generator.logits(IDS[0].tolist())
    assert np.abs(found - expected).max() < 2e-4 * np.abs(expected).max()
    provenance = tuned_bundle.manifest.provenance
    stage = provenance.stages[0]
    facts = stage.report["adapter"]
    assert facts["sha256"] == read_adapter(adapters["whole"]).sha256
    assert facts["layers"] == 2 and facts["ranks"] == [8]
    assert {"lm_head.weight", "model.norm.weight"} <= set(facts["whole"])
    assert provenance.checkpoint == "tied + whole" and stage.options["adapter"] == "whole"
    assert provenance.sha256 != facts["checkpoint_sha256"]
    assert not tuned_bundle.manifest.heads["lm"].tied  # the adapter brings another head


def test_a_wrong_merge_is_found_by_the_parity(tied, adapters, tmp_path):
    product = LowRank.product
    with (
        mock.patch.object(LowRank, "product", lambda pair: 1.01 * product(pair)),
        pytest.raises(ParityError),
    ):
        export(Options(model=str(tied), output=tmp_path / "b", adapter=adapters["attention"]))
    assert not (tmp_path / "b").exists()


def test_build_takes_it_and_a_recipe_does_not(tied, adapters, tmp_path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text("[export]\ndtype = 'fp16'\n")
    options = BuildOptions(str(tied), recipe, tmp_path / "b", adapter=adapters["attention"])
    bundle = build(options)
    assert bundle.manifest.provenance.stages[0].report["adapter"]["name"] == "attention"
    recipe.write_text("[export]\nadapter = 'somewhere'\n")
    with pytest.raises(UsageError, match="adapter belongs on the command line"):
        build(options)


def test_validation_needs_the_same_adapter(tuned_bundle, tied, adapters, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("Weights moved, and a proof says how far.")
    options = ValidateOptions(
        tuned_bundle.path,
        str(tied),
        (text,),
        adapter=adapters["whole"],
        greedy_tokens=4,
        attribution_tokens=0,
        noise_floor_tokens=0,
    )
    report = validate(options)
    facts = report.reference
    assert facts.checkpoint == "tied + whole"
    assert facts.sha256 == tuned_bundle.manifest.provenance.sha256
    assert report.slices[0].metrics.kl_mean.value < 1e-8
    own = checkpoint_sha256(find_checkpoint(str(tied)))
    alone = msgspec.structs.replace(facts, checkpoint="tied", sha256=own)
    with pytest.raises(UsageError, match=r"the adapter whole, the reference tied.*do this"):
        check_adapter(tuned_bundle, alone, None, "do this")
    check_adapter(tuned_bundle, msgspec.structs.replace(facts, sha256="merged"), None, "")
    with pytest.raises(UsageError, match=r"exported from tied \+ whole, the reference is .* other"):
        check_adapter(
            tuned_bundle, msgspec.structs.replace(facts, sha256="other"), adapters["all"], ""
        )


def test_an_adapter_on_the_head_is_no_reference(tied, adapters):
    with pytest.raises(ExportError, match=r"changes the head.*merge_and_unload"):
        put_beside(load_model(find_checkpoint(str(tied))), adapters["head"])


def changed(adapter: Path, folder: Path, config: dict[str, Any], tensors: Any = None) -> Path:
    shutil.copytree(adapter, folder)
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    if tensors is not None:
        stored = load_file(folder / "adapter_model.safetensors")
        save_file(tensors(stored), folder / "adapter_model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"use_dora": True}, "use_dora=True; merge it with PEFT"),
        ({"lora_bias": True}, "lora_bias=True"),
        ({"bias": "all"}, "bias='all'"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'"),
        ({"some_new_field": 3}, "some_new_field=3"),
        ({"peft_type": "IA3"}, "a LoRA adapter was expected, this one is IA3; merge it"),
        ({"peft_type": "CPT"}, "this one is CPT; learnt tokens of this kind are not exported"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(config, message, tied, adapters, tmp_path):
    folder = changed(adapters["attention"], tmp_path / "a", config)
    with pytest.raises(ExportError, match=message):
        find_tuned(read_adapter(folder), load_model(find_checkpoint(str(tied))))


def _without(name: str) -> Any:
    return lambda stored: {n: t for n, t in stored.items() if name not in n}


def _poisoned(stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    next(iter(stored.values()))[0, 0] = float("nan")
    return stored


@pytest.mark.parametrize(
    ("config", "tensors", "message"),
    [
        ({}, _without("layers.1.self_attn.q_proj.lora_B"), "missing: .*q_proj.lora_B; save it"),
        ({}, _without("layers.1.self_attn.q_proj"), "missing: .*layers.1.self_attn.q_proj.lora_A"),
        ({"modules_to_save": ["lm_head"]}, None, "missing: lm_head.weight"),
        ({}, _without("lora"), "are missing"),
        ({}, _poisoned, "hold NaN or infinity: .*q_proj.lora_A.weight"),
        ({"r": 5}, None, r"another model.*needs A \[5, 64\].*has \[4, 64\]"),
        ({"rank_pattern": ["q"]}, None, "rank_pattern and alpha_pattern must be objects"),
        ({"alpha_pattern": {"(": 2}}, None, "'\\(' is no regular expression"),
        ({"target_modules": "*"}, None, r"'\*' is no regular expression"),
        ({"r": 0}, None, "r and lora_alpha must be numbers above 0, found 0"),
    ],
)
def test_broken_adapters(config, tensors, message, tied, adapters, tmp_path):
    folder = changed(adapters["attention"], tmp_path / "a", config, tensors)
    with pytest.raises(CheckpointError, match=message):
        apply_adapter(load_model(find_checkpoint(str(tied))), folder)


def test_an_adapter_for_another_model(tied, adapters, tmp_path):
    other = save_model(tmp_path / "wide", llama_config(hidden_size=32, num_hidden_layers=1))
    model = load_model(find_checkpoint(str(other)))
    with pytest.raises(CheckpointError, match=r"another model \(tied\): LlamaForCausalLM has no"):
        apply_adapter(model, adapters["attention"])
    short = changed(adapters["attention"], tmp_path / "a", {}, _without("layers.1"))
    with pytest.raises(CheckpointError, match=r"needs A \[4, 32\] and B \[32, 4\]"):
        apply_adapter(model, short)


def test_missing_files(tied, tmp_path):
    with pytest.raises(CheckpointError, match=r"no adapter_config\.json in it"):
        read_adapter(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"pickled file.*safe_serialization=True"):
        read_adapter(tmp_path)


def test_models_that_take_none(tied):
    with pytest.raises(ExportError, match="decoder-only models, this is a text-to-text model"):
        check_adaptable(find_checkpoint(str(tied)), "text-to-text")
